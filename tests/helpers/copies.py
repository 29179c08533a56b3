"""Ways to copy a model, an optimizer or a state dict."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch


def pickled(thing: Any) -> Any:
    return pickle.loads(pickle.dumps(thing))


def through_a_file(thing: Any, *, weights_only: bool = True) -> Any:
    """What ``torch.save`` writes and ``torch.load`` reads."""
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def objects_through_a_file(thing: Any) -> Any:
    return through_a_file(thing, weights_only=False)

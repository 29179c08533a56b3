"""Files of torch.save.

torch.load with ``weights_only`` builds tensors and plain containers and runs nothing else. ``mmap`` leaves the numbers
on disk until they are read. It also keeps a tensor from growing its storage to a size that only the pickle claims.
"""

from __future__ import annotations

import os
import pickle
import re
import warnings
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import torch

from rowstep.arrays._npz import checked_members
from rowstep.cli._inspect.reading import UnreadableError

_ADVICE = ("In PyTorch", "Please file an issue", "Check the documentation")


def read(path: Path) -> Any:
    with zipfile.ZipFile(path) as archive:
        checked_members(archive, os.path.getsize(path))
    return load(path, mmap=True)


def load(source: Path | BinaryIO, *, mmap: bool = False, device: str = "cpu") -> Any:
    """What torch.load makes of this without running anything."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of dtypes and layouts that torch will drop: not the reader's concern
            return torch.load(source, map_location=device, weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        raise UnreadableError(_refusal(error)) from error
    except RuntimeError as error:
        if "resize storage" not in str(error):
            raise
        raise UnreadableError("a tensor claims more numbers than its storage has; expected at most those") from error


def _refusal(error: Exception) -> str:
    """What the file wanted to run, from among torch's advice on how to let it."""
    if named := re.search(r"GLOBAL (\S+)", str(error)):
        return (
            f"it holds {named[1]}, which is more than tensors and plain containers and is not loaded; expected a "
            "checkpoint of state dicts. Save model.state_dict() and optimizer.state_dict()"
        )
    lines = (line.strip() for line in str(error).removeprefix("Weights only load failed. ").split("\n"))
    causes = (line for line in lines if line and not line.startswith(_ADVICE))
    return f"torch.load does not take it: {next(causes, 'it is no checkpoint')}"

"""Warnings that point at the user's own line, however many layers lie in between."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

_OURS = str(Path(__file__).parent)


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the innermost line that is neither ours nor of torch's wrappers around an optimizer's step."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and _is_between(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def _is_between(filename: str) -> bool:
    is_torchs = "/torch/" in filename.replace("\\", "/")
    return filename.startswith((_OURS, "<frozen")) or is_torchs

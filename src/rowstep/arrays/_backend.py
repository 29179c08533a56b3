"""Which implementation steps these arrays: the compiled kernels, or NumPy."""

from __future__ import annotations

import functools
import os
from typing import Any

from .._choice import choose
from . import _reference
from ._checks import FloatArray


def chosen(p: FloatArray, g: FloatArray) -> Any:
    """The module whose ``step`` and ``step_rows`` to call. Numba is imported by the first step that needs it."""
    preferred = _load(os.environ.get("ROWSTEP_BACKEND", ""))
    # Numba has no float16.
    return _reference if 2 in (p.itemsize, g.itemsize) else preferred


@functools.cache
def _load(name: str) -> Any:
    package = __name__.rpartition(".")[0]
    return choose(name, f"{package}._compiled", f"{package}._reference")

"""Which implementation runs: chosen here and nowhere else, as ``rowstep._backends`` does for the torch optimizers."""

from __future__ import annotations

import functools
import os
import warnings
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .._rule import Rule
from . import _reference
from ._operands import FloatArray


class Backend(Protocol):
    """What an implementation offers. Operands have been checked; the moments have the parameter's shape and dtype."""

    def step(self, p: FloatArray, m: FloatArray, v: FloatArray, g: FloatArray, rule: Rule) -> None: ...
    def step_rows(
        self, p: FloatArray, m: FloatArray, v: FloatArray, rows: NDArray[np.int64], g: FloatArray, rule: Rule
    ) -> None: ...


def chosen() -> Backend:
    """The backend in force. Numba is imported by the first step that needs it, not with the package."""
    return _load(os.environ.get("ROWSTEP_BACKEND", ""))


@functools.cache
def _load(name: str) -> Backend:
    if name not in ("", "numba", "reference"):
        raise ValueError(f"ROWSTEP_BACKEND is {name!r}; expected 'numba' or 'reference'")
    if name == "reference":
        return _reference
    try:
        from . import _compiled
    except ImportError as error:
        if name == "numba":
            raise
        warnings.warn(
            f"rowstep.arrays runs its slow NumPy implementation, because Numba could not be imported: {error}",
            RuntimeWarning,
            stacklevel=4,
        )
        return _reference
    return _compiled

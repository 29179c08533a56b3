"""Which implementation is preferred. The compiled one hands what it cannot address to the reference."""

from __future__ import annotations

import functools
import os
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .._choice import choose
from .._rules.adam import Scalars
from ._operands import FloatArray


class Backend(Protocol):
    """What an implementation offers. Operands have been checked; the moments have the parameter's shape and dtype."""

    def step(self, p: FloatArray, m: FloatArray, v: FloatArray, g: FloatArray, scalars: Scalars) -> None: ...
    def step_rows(
        self, p: FloatArray, m: FloatArray, v: FloatArray, rows: NDArray[np.int64], g: FloatArray, scalars: Scalars
    ) -> None: ...


def chosen() -> Backend:
    """The backend in force. Numba is imported by the first step that needs it, not with the package."""
    return _load(os.environ.get("ROWSTEP_BACKEND", ""))


@functools.cache
def _load(name: str) -> Backend:
    package = __name__.rpartition(".")[0]
    backend: Backend = choose(name, f"{package}._compiled", f"{package}._reference", stacklevel=4)
    return backend

"""Which implementation of the row update runs: chosen here and nowhere else.

``numba`` is the default. Where it cannot be imported, the reference runs, and one warning says so.
``ROWSTEP_BACKEND=reference`` or ``=numba`` in the environment forces one.
"""

from __future__ import annotations

import functools
import os
from typing import Protocol

from torch import Tensor

from .._choice import choose
from .._gradient import RowGradient
from .._rule import Rule
from .._schedule import Schedule
from .._state import State
from .gate import Addresses, Operands, admit, admit_counts, admit_state
from .outcome import Outcome

__all__ = ["Addresses", "Backend", "Operands", "Outcome", "admit", "admit_counts", "admit_state", "chosen"]


class Backend(Protocol):
    """What an implementation offers."""

    def first_outside(self, rows: Tensor, row_count: int) -> int | None: ...
    def has_nonfinite(self, gradient: RowGradient) -> bool: ...
    def norm(self, gradient: RowGradient, power: float) -> float: ...
    def update(self, operands: Operands, rule: Rule, outcome: Outcome) -> None: ...

    def count_stale(self, since: Tensor, rows: Tensor, step: int) -> int: ...
    def mark(self, since: Tensor, rows: Tensor, step: int) -> None: ...
    def catch_up(
        self, param: Tensor, state: State, since: Tensor, schedule: Schedule, rows: Tensor | range
    ) -> None: ...


def chosen() -> Backend:
    """The backend in force. Numba is imported by the first step that needs it, not with the package."""
    return _load(os.environ.get("ROWSTEP_BACKEND", ""))


@functools.cache
def _load(name: str) -> Backend:
    # 7: past torch's wrappers around a step, at the line that called it
    backend: Backend = choose(name, f"{__name__}.numba", f"{__name__}.reference", stacklevel=7)
    return backend

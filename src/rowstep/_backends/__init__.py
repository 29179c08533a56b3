"""Which implementation runs, for each tensor of the torch optimizers: chosen here and nowhere else.

The kernels take what lies in this machine's memory without gaps. The reference takes everything: GPUs and other
devices, strides of their own. ``ROWSTEP_BACKEND=reference`` or ``=numba`` in the environment forces one. Without Numba
the reference runs, and one warning says so.

Everything passes the gate on its way, for both.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from .._choice import choose
from .._gradient import RowGradient
from . import reference
from .gate import (
    Addresses,
    LateRows,
    Notes,
    RowUpdate,
    admit,
    admit_counts,
    admit_gradient,
    admit_notes,
    admit_rows,
    admit_state,
)
from .outcome import Outcome

__all__ = [
    "Addresses",
    "Backend",
    "Batch",
    "LateRows",
    "Notes",
    "Outcome",
    "RowUpdate",
    "admit",
    "admit_counts",
    "admit_notes",
    "admit_state",
    "chosen",
    "in_plain_torch",
]


class Backend:
    """An implementation that is preferred, and the reference for what it cannot take."""

    def __init__(self, preferred: Any) -> None:
        self._preferred = preferred

    def first_outside(self, rows: Tensor, row_count: int) -> int | None:
        """The first of these row numbers that is not in a table of so many rows."""
        found: int | None = self._for(admit_rows(rows)).first_outside(rows, row_count)
        return found

    def outside(self, gradient: RowGradient) -> int | None:
        """The first row number of a gradient that is not in its table."""
        found: int | None = self._for(admit_gradient(gradient)).first_outside(gradient.rows, gradient.row_count)
        return found

    def has_nonfinite(self, gradient: RowGradient) -> bool:
        """Whether the summed gradient of some row is not finite."""
        return bool(self._for(admit_gradient(gradient) and not gradient.is_empty).has_nonfinite(gradient))

    def norm(self, gradient: RowGradient, power: float) -> float:
        """The ``power``-norm of the summed gradient, as if it were dense."""
        is_for_kernels = admit_gradient(gradient) and not gradient.is_empty and power > 0
        return float(self._for(is_for_kernels).norm(gradient, power))

    def batches(self, updates: Sequence[RowUpdate]) -> Iterator[Batch]:
        """The updates of one group: those together that one launch can make."""
        alike: dict[Any, list[RowUpdate]] = {}
        for update in updates:
            if update.gradient.is_empty:
                yield Batch(None, [update])
            elif update.at is None or self._preferred is reference:
                yield Batch(reference, [update])
            else:
                _, _, _, _, _, *dtypes, _ = update.at
                scalars = update.scalars
                kind = *dtypes, update.gradient.values.dtype, scalars.as_dense, scalars.kept, scalars.rounds_weights
                alike.setdefault(kind, []).append(update)
        for together in alike.values():
            yield Batch(self._preferred, together)

    def catch_up(self, late: LateRows, rows: Tensor | range) -> int | None:
        """Bring these rows of a table and its moments from the steps in their notes to the schedule's.

        If a row number is not in the table, nothing is changed, and the first such number is returned.
        """
        # A signal's handler may come in between, and flush: the place is kept, and good for as long as this takes.
        place = late.admit()
        is_for_kernels = place is not None and (isinstance(rows, range) or admit_rows(rows))
        outside: int | None = self._for(is_for_kernels).catch_up(late, place, rows)
        return outside

    def look_at(self, gradient: RowGradient, notes: Notes, step: int) -> tuple[int | None, int]:
        """The first row number that is not in the table, and how many name a row that has no note of this step."""
        is_for_kernels = admit_gradient(gradient) and notes.at
        looked: tuple[int | None, int] = self._for(is_for_kernels).look_at(gradient.rows, notes.tensor, step)
        return looked

    def _for(self, is_addressable: object) -> Any:
        return self._preferred if is_addressable else reference


class Batch:
    """Updates that are made whole or not at all."""

    __slots__ = ("_implementation", "updates")

    def __init__(self, implementation: Any, updates: list[RowUpdate]) -> None:
        self._implementation, self.updates = implementation, updates

    def update(self, outcome: Outcome) -> None:
        """Step the rows that the gradients name, in place."""
        if self._implementation is None:
            for update in self.updates:
                if update.notes is not None:  # rows without a single number are up to date as well
                    update.notes.tensor[update.gradient.rows] = update.notes.note
            outcome.complete()
        else:
            self._implementation.update(self.updates, outcome)


def chosen() -> Backend:
    """The backend in force. Numba is imported by the first step that needs it, not with the package."""
    return _load(os.environ.get("ROWSTEP_BACKEND", ""))


in_plain_torch = Backend(reference)
"""For whoever must not compile or launch anything."""


@functools.cache
def _load(name: str) -> Backend:
    # 7: past torch's wrappers around a step, at the line that called it
    return Backend(choose(name, f"{__name__}.numba", f"{__name__}.reference", stacklevel=7))

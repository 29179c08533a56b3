"""What one step makes of the columns' part of a factored second moment, and of the sum over all rows.

Every row that is stepped needs both as they are after the step, so they are computed first, from the squares of the
whole gradient, and written to the state when the rows have moved.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .._rules.adam import Scalars, averaged
from .._state import State, compute_dtype, lasting

# Below this, the inverse of a mean is not a finite number any more.
_SMALLEST_MEAN = 1e-300
_LARGEST_SCALE = 1e300

_AT_LEAST_EVERY = 256


class Columns:
    """The columns of one table in one step."""

    __slots__ = ("column", "roots", "row_scale", "total")

    column: Tensor
    """The columns' part after the step, as it will be stored."""
    total: float
    """The sum of the rows' part after the step."""
    roots: Tensor
    """The square roots of ``column``, in the dtype computed with."""
    row_scale: float
    """What turns the rows' part into r / s."""

    def take(
        self, state: State, scalars: Scalars, sums: Sums, total: float, row_count: int, dtype: torch.dtype
    ) -> None:
        """Compute what the step makes of them from the sums over a gradient; write nothing yet.

        ``total`` is the sum over all rows before the step.
        """
        before = state["exp_avg_sq_column"]
        squares = sums.squares.view(before.shape).to(before.device) / max(sums.rows, 1)
        column = averaged(
            before.double(), squares, scalars.beta2, 1 - scalars.beta2, scalars.as_dense or None
        )  # fmt: skip
        if not sums.rows and sums.rest == 1:
            column = before  # no row decays, so no column does
        self.column = column.to(before.dtype)
        self.roots = self.column.to(compute_dtype(dtype, before.dtype)).flatten().sqrt().to(dtype)
        self.total = (total - sums.before) * sums.rest + sums.after
        mean = self.total / max(row_count, 1)
        # A NaN stays one. Where a row has overflowed, v is taken for infinite and nothing moves, instead of r c / inf.
        self.row_scale = _LARGEST_SCALE if mean == math.inf else 0.0 if mean <= _SMALLEST_MEAN else 1 / mean

    def store(self, state: State) -> None:
        """Put them into the state; a second call changes nothing more. Nothing is written in place: it might fail."""
        with lasting():
            total = torch.tensor(self.total, dtype=torch.float64, device=self.column.device)
        state.update(exp_avg_sq_column=self.column, exp_avg_sq_sum=total)


def is_summed_anew(step: int, beta2: float) -> bool:
    """Whether the sum over all rows is to be taken from the rows themselves before this step.

    Where only touched rows decay, the sum is kept by what is added and taken away, and its rounding stays that of the
    largest numbers that were ever in it: after one huge gradient it would be wrong for good. A row keeps beta2 of its
    number in a step, so in as many steps as beta2 takes to fall to a millionth, the sum loses six digits of sixteen. To
    sum 10M rows takes 3 ms, once in so many steps.
    """
    often = 1 if beta2 <= 0 else int(math.log(1e-6) / math.log(beta2)) if beta2 < 1 else _AT_LEAST_EVERY
    return (step - 1) % max(1, min(often, _AT_LEAST_EVERY)) == 0


class Sums:
    """Sums over the rows that a gradient names."""

    __slots__ = ("after", "before", "rest", "rows", "squares")

    def __init__(self, squares: Tensor, rows: int, before: float, after: float, rest: float) -> None:
        self.squares = squares
        """Per column, float64."""
        self.rows, self.before, self.after = rows, before, after
        """How many rows, and the sums of their second moments before and after the step."""
        self.rest = rest
        """What a step leaves of the second moments of all other rows: beta2 where those decay as well."""

    def as_tensor(self) -> Tensor:
        """All that is added up over ranks, in one tensor."""
        return torch.cat([self.squares.cpu(), torch.tensor([self.rows, self.before, self.after], dtype=torch.float64)])

    @classmethod
    def of(cls, numbers: Tensor, rest: float) -> Sums:
        """The sums in such a tensor."""
        rows, before, after = numbers[-3:].tolist()
        return cls(numbers[:-3], int(rows), before, after, rest)

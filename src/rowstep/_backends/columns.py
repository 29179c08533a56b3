"""What one step makes of the columns' part of a factored second moment, and of the sum over all rows.

Every row that is stepped needs both as they are after the step, so they are computed first, from the squares of the
whole gradient, and written to the state when the rows have moved.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._rules.adam import Scalars, averaged
from .._state import State, compute_dtype

# Below this, the inverse of a mean is not a finite number any more.
_SMALLEST_MEAN = 1e-300


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

    def take(self, state: State, scalars: Scalars, sums: Sums, row_count: int, dtype: torch.dtype) -> None:
        """Compute what the step makes of them from the sums over a gradient; write nothing yet."""
        before = state["exp_avg_sq_column"]
        squares = sums.squares.view(before.shape).to(before.device) / max(sums.rows, 1)
        column = averaged(
            before.double(), squares, scalars.beta2, 1 - scalars.beta2, scalars.as_dense or None
        )  # fmt: skip
        self.column = column.to(before.dtype)
        self.roots = self.column.to(compute_dtype(dtype, before.dtype)).flatten().sqrt().to(dtype)
        self.total = (float(state["exp_avg_sq_sum"]) - sums.before) * sums.rest + sums.after
        mean = self.total / max(row_count, 1)
        self.row_scale = 0.0 if mean <= _SMALLEST_MEAN else 1 / mean  # a NaN stays one

    def store(self, state: State) -> None:
        """Write them to the state; a second call changes nothing more."""
        state["exp_avg_sq_column"].copy_(self.column)
        state["exp_avg_sq_sum"].fill_(self.total)


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

"""The specification: the row update in plain torch operations, on any device, dtype and layout.

It runs the rule of ``rowstep._rules.adam`` on tensors, and defines what the compiled kernels must compute.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..._gradient import RowGradient
from ..._rules import adam
from ..._rules.adam import Scalars
from ..._state import compute_dtype
from ..gate import RowUpdate
from ..outcome import Outcome


def first_outside(rows: Tensor, row_count: int) -> int | None:
    """The first of these row numbers that is not in a table of so many rows."""
    outside = (rows < 0) | (rows >= row_count)
    return int(rows[outside][0]) if outside.any() else None


def has_nonfinite(gradient: RowGradient) -> bool:
    """Whether the summed gradient of some row is not finite."""
    _, summed = _sum_duplicates(gradient, compute_dtype(gradient.values.dtype))
    return not bool(summed.isfinite().all())


def norm(gradient: RowGradient, power: float) -> float:
    """The ``power``-norm of the summed gradient, as if it were dense: 0 stands where it names no row."""
    rows, summed = _sum_duplicates(gradient, compute_dtype(gradient.values.dtype))
    numbers = summed.double().flatten()
    if len(rows) < gradient.row_count and gradient.columns:
        numbers = torch.cat([numbers, numbers.new_zeros(1)])  # one is enough: to powers below 0 it is the whole norm
    if power == math.inf and not numbers.numel():
        return 0.0
    return float(torch.linalg.vector_norm(numbers, power))


def update(updates: Sequence[RowUpdate], outcome: Outcome) -> None:
    """Step the rows that the gradient of a single update names, in place."""
    ((param, state, gradient, scalars, notes, _, _),) = updates
    dtype = compute_dtype(param.dtype, state["exp_avg"].dtype, gradient.values.dtype)
    rows, g = _sum_duplicates(gradient, dtype)
    skipped = 0
    if scalars.skip_nonfinite:
        finite = g.isfinite().all(dim=1)
        skipped = len(rows) - int(finite.sum())
        rows, g = rows[finite], g[finite]

    table = RowsOf(gradient.lead, rows)
    changes: list[tuple[Tensor, Tensor]] = []
    step_size: float | Tensor = scalars.step_size
    eps: float | Tensor = scalars.eps
    if scalars.per_row:
        count = table.read(state["row_step"], torch.int64) + 1
        changes.append((state["row_step"], count))
        step_size, eps = _corrected_by(count, scalars, dtype)
    names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if scalars.amsgrad else ("exp_avg", "exp_avg_sq")
    places = [param, *(state[name] for name in names)]
    before = [table.read(place, dtype) for place in places]
    p, m, v, *u = before
    after = adam.update(
        p, m, v, u[0] if u else None, g,
        1 - scalars.beta1, scalars.beta2, 1 - scalars.beta2, eps, step_size,
        scalars.maximize or None, scalars.shrink, scalars.decay, scalars.as_dense or None,
        torch.sqrt, torch.maximum,
    )  # fmt: skip
    changes += zip(places, after, strict=False)
    if notes is not None:
        changes.append((notes.tensor, torch.full_like(rows, notes.note)))
    table.write(changes, outcome, skipped)


def _sum_duplicates(gradient: RowGradient, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The distinct rows, ascending, and for each the sum of its occurrences, added in order of occurrence."""
    values = gradient.values.to(dtype)
    rows, position = torch.unique(gradient.rows, return_inverse=True)
    return rows, values.new_zeros(len(rows), gradient.columns).index_add_(0, position, values)


def _corrected_by(count: Tensor, scalars: Scalars, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Each row's step size and eps, as columns, from how many steps it has taken."""
    first, second = adam.corrections(scalars.beta1, scalars.beta2, count.double(), torch.sqrt)
    eps = scalars.eps * second if scalars.as_dense else torch.full_like(second, scalars.eps)
    return (scalars.step_size * second / first).to(dtype), eps.to(dtype)


class RowsOf:
    """Distinct rows of a table, read and written as a matrix. Indexing, unlike a view, works for any strides."""

    def __init__(self, lead: tuple[int, ...], rows: Tensor) -> None:
        self._whole = not lead
        self._index = torch.unravel_index(rows, lead) if lead else (rows,)

    def read(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """These rows of a tensor, as a matrix of this dtype."""
        picked = self._pick(tensor)
        return picked.reshape(len(picked), math.prod(picked.shape[1:])).to(dtype)

    def write(self, changes: Sequence[tuple[Tensor, Tensor]], outcome: Outcome, skipped: int = 0) -> None:
        """Write these matrices into these tensors: all of them or, if it is interrupted, none."""
        before = [(tensor, self._pick(tensor)) for tensor, _ in changes]
        try:
            for tensor, values in changes:
                self._put(tensor, values)
            outcome.complete(skipped)
        except BaseException:
            for tensor, values in before:
                self._put(tensor, values)
            raise

    def _pick(self, tensor: Tensor) -> Tensor:
        return self._table(tensor)[self._index]

    def _put(self, tensor: Tensor, values: Tensor) -> None:
        table = self._table(tensor)
        table.index_put_(self._index, values.reshape(len(values), *table.shape[len(self._index) :]).to(table.dtype))

    def _table(self, tensor: Tensor) -> Tensor:
        return tensor.unsqueeze(0) if self._whole else tensor

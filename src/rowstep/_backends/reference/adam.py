"""The specification: the row update in plain torch operations, on any device, dtype and layout.

It reads in the order of the equations in ``rowstep._rule`` and defines what the compiled kernels must compute.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..._gradient import RowGradient
from ..._rule import Rule
from ..._state import compute_dtype
from ..gate import Operands, admit_gradient, admit_rows
from ..outcome import Outcome


def first_outside(rows: Tensor, row_count: int) -> int | None:
    """The first of these row numbers that is not in a table of so many rows."""
    admit_rows(rows)
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


def update(operands: Operands, rule: Rule, outcome: Outcome) -> None:
    """Step the rows that the gradient names, in place."""
    param, state, gradient, _ = operands
    dtype = compute_dtype(param.dtype, state["exp_avg"].dtype, gradient.values.dtype)
    rows, g = _sum_duplicates(gradient, dtype)
    skipped = 0
    if rule.skip_nonfinite:
        finite = g.isfinite().all(dim=1)
        skipped = len(rows) - int(finite.sum())
        rows, g = rows[finite], g[finite]

    table = RowsOf(gradient.lead, rows)
    p = table.read(param, dtype)
    m = table.read(state["exp_avg"], dtype)
    v = table.read(state["exp_avg_sq"], dtype)
    if rule.maximize:
        g = -g
    if rule.shrink is not None:
        p = p * rule.shrink
    if rule.decay is not None:
        g = g + rule.decay * p
    m = m + (g - m) * (1 - rule.beta1)
    v = v * rule.beta2 + g * g * (1 - rule.beta2) if rule.as_dense else v + (g * g - v) * (1 - rule.beta2)
    changes = [(state["exp_avg"], m), (state["exp_avg_sq"], v)]
    if rule.amsgrad:
        v = torch.maximum(table.read(state["max_exp_avg_sq"], dtype), v)
        changes.append((state["max_exp_avg_sq"], v))
    step_size: float | Tensor = rule.step_size
    eps: float | Tensor = rule.eps
    if rule.per_row:
        count = table.read(state["row_step"], torch.int64) + 1
        changes.append((state["row_step"], count))
        step_size, eps = _corrected_by(count, rule, dtype)
    changes.append((param, p - step_size * (m / (v.sqrt() + eps))))
    table.write(changes, outcome, skipped)


def _sum_duplicates(gradient: RowGradient, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The distinct rows, ascending, and for each the sum of its occurrences, added in order of occurrence."""
    admit_gradient(gradient)
    values = gradient.values.to(dtype)
    rows, position = torch.unique(gradient.rows, return_inverse=True)
    return rows, values.new_zeros(len(rows), gradient.columns).index_add_(0, position, values)


def _corrected_by(count: Tensor, rule: Rule, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Each row's step size and eps, as columns, from how many steps it has taken."""
    correction1, correction2 = 1 - rule.beta1 ** count.double(), (1 - rule.beta2 ** count.double()).sqrt()
    eps = rule.eps * correction2 if rule.as_dense else torch.full_like(correction2, rule.eps)
    return (rule.step_size * correction2 / correction1).to(dtype), eps.to(dtype)


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

"""The specification: the row update in plain torch operations, on any device, dtype and layout.

It reads in the order of the equations in ``rowstep._rule`` and defines what the compiled kernels must compute.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..._gradient import RowGradient
from ..._rule import Rule
from ..._state import State, compute_dtype


def first_outside(gradient: RowGradient) -> int | None:
    """The first row number that is not in the table."""
    outside = (gradient.rows < 0) | (gradient.rows >= gradient.row_count)
    if not outside.any():
        return None
    return int(gradient.rows[outside][0])


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


def update(param: Tensor, state: State, gradient: RowGradient, rule: Rule) -> int:
    """Step the rows of ``param`` that ``gradient`` names, in place; return how many rows were skipped."""
    dtype = compute_dtype(param.dtype, state["exp_avg"].dtype, gradient.values.dtype)
    rows, g = _sum_duplicates(gradient, dtype)
    skipped = 0
    if rule.skip_nonfinite:
        finite = g.isfinite().all(dim=1)
        skipped = len(rows) - int(finite.sum())
        rows, g = rows[finite], g[finite]

    place = RowsOf(gradient.lead, rows)
    p = place.read(param, dtype)
    m = place.read(state["exp_avg"], dtype)
    v = place.read(state["exp_avg_sq"], dtype)
    if rule.maximize:
        g = -g
    if rule.shrink is not None:
        p = p * rule.shrink
    if rule.decay is not None:
        g = g + rule.decay * p
    m = m + (g - m) * (1 - rule.beta1)
    v = v + (g * g - v) * (1 - rule.beta2)
    place.write(state["exp_avg"], m)
    place.write(state["exp_avg_sq"], v)
    if rule.amsgrad:
        v = torch.maximum(place.read(state["max_exp_avg_sq"], dtype), v)
        place.write(state["max_exp_avg_sq"], v)
    step_size, eps = _count_rows(state["row_step"], place, rule, dtype) if rule.per_row else (rule.step_size, rule.eps)
    place.write(param, p - step_size * (m / (v.sqrt() + eps)))
    return skipped


def _sum_duplicates(gradient: RowGradient, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The distinct rows, ascending, and for each the sum of its occurrences, added in order of occurrence."""
    values = gradient.values.to(dtype)
    rows, position = torch.unique(gradient.rows, return_inverse=True)
    return rows, values.new_zeros(len(rows), gradient.columns).index_add_(0, position, values)


def _count_rows(row_step: Tensor, place: RowsOf, rule: Rule, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Count a step for each row; return each row's step size and eps, as columns."""
    count = place.read(row_step, torch.int64) + 1
    place.write(row_step, count)
    correction1, correction2 = 1 - rule.beta1 ** count.double(), (1 - rule.beta2 ** count.double()).sqrt()
    eps = rule.eps * correction2 if rule.corrected_eps else torch.full_like(correction2, rule.eps)
    return (rule.step_size * correction2 / correction1).to(dtype), eps.to(dtype)


class RowsOf:
    """Distinct rows of a table, read and written as a matrix. Indexing, unlike a view, works for any strides."""

    def __init__(self, lead: tuple[int, ...], rows: Tensor) -> None:
        self._whole = not lead
        self._index = torch.unravel_index(rows, lead) if lead else (rows,)

    def _table(self, tensor: Tensor) -> Tensor:
        return tensor.unsqueeze(0) if self._whole else tensor

    def read(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        picked = self._table(tensor)[self._index]
        return picked.reshape(len(picked), math.prod(picked.shape[1:])).to(dtype)

    def write(self, tensor: Tensor, values: Tensor) -> None:
        table = self._table(tensor)
        table.index_put_(self._index, values.reshape(len(values), *table.shape[len(self._index) :]).to(table.dtype))

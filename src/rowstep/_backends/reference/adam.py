"""The specification: the row update in plain torch operations, on any device, dtype and layout.

It runs the rule of ``rowstep._rules.adam`` on tensors, and defines what the compiled kernels must compute.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..._gradient import RowGradient
from ..._rule import Step
from ..._rules import adam
from ..._state import compute_dtype
from ..._table import Job
from .rounding import Noise


def first_outside(gradient: RowGradient) -> int | None:
    """The first row number of a gradient that is not in its table."""
    rows = gradient.rows
    outside = (rows < 0) | (rows >= gradient.row_count)
    return int(rows[outside][0]) if outside.any() else None


def norm(gradient: RowGradient, power: float) -> float:
    """The ``power``-norm of the summed gradient, as if it were dense: 0 stands where it names no row."""
    rows, summed = _sum_duplicates(gradient, compute_dtype(gradient.values.dtype))
    numbers = summed.double().flatten()
    if len(rows) < gradient.row_count and gradient.columns:
        numbers = torch.cat([numbers, numbers.new_zeros(1)])  # one is enough: to powers below 0 it is the whole norm
    if power == math.inf and not numbers.numel():
        return 0.0
    return float(torch.linalg.vector_norm(numbers, power))


class Launch:
    """One job: this implementation makes one after the other."""

    def __init__(self, job: Job) -> None:
        self.jobs = [job]

    def first_flawed(self) -> Job | None:
        """The job, if it names a row outside its table, or one that waits."""
        (job,) = self.jobs
        gradient, pending = job.gradient, job.table.pending
        is_flawed = first_outside(gradient) is not None or (pending is not None and pending.stale(gradient.rows) > 0)
        return job if is_flawed else None

    def reserve(self, most_threads: int) -> None:
        """Nothing is reserved here: what a step takes of memory is written at its end, or not at all."""

    def step(self) -> int:
        """Step the rows; return how many were skipped."""
        return update(*self.jobs)


def update(job: Job) -> int:
    """Step the rows that the gradient of a job names, in place; return how many were skipped."""
    table, step, gradient = job.table, job.step, job.gradient
    param, slots, spec, rule, scalars = table.param, table.slots, table.spec, step.rule, step.scalars
    dtype = compute_dtype(*table.dtypes, gradient.values.dtype)
    rows, g = _sum_duplicates(gradient, dtype)
    is_stepped = torch.ones_like(rows, dtype=torch.bool)
    if rule.skips_nonfinite:
        is_stepped = g.isfinite().all(dim=1)
    skipped = len(rows) - int(is_stepped.sum())
    if table.pending is not None:  # unless a signal's handler has brought a row past this step
        is_stepped &= table.pending.notes.view(-1)[rows] < job.note
    rows, g = rows[is_stepped], g[is_stepped]
    place = RowsOf(gradient.lead, rows)
    changes: list[tuple[Tensor, Tensor]] = []
    step_size: float | Tensor = scalars.step_size
    eps: float | Tensor = scalars.eps
    if rule.spec.is_counted:
        count = place.read(slots["row_step"], torch.int64) + 1
        changes.append((slots["row_step"], count))
        step_size, eps = _corrected_by(count, step, dtype)
    p = place.read(param, dtype)
    if spec.is_by_row:
        r = _rows_second_moment(p, place.read(slots["exp_avg_sq_row"], dtype), g, step)
        changes.append((slots["exp_avg_sq_row"], r))
        step_size = step_size / (r.sqrt() + eps)
    places = [slots.get(name) for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")]
    m, v, u = (None if slot is None else place.read(slot, dtype) for slot in places)
    after = adam.update(
        p, m, v, u, g,
        1 - scalars.beta1, scalars.beta2, 1 - scalars.beta2, eps, step_size,
        rule.maximize or None, scalars.shrink, scalars.decay, step.as_dense or None,
        torch.sqrt, torch.maximum,
    )  # fmt: skip
    noise = Noise(step.key, rows, gradient.columns)
    if rule.rounds_weights:
        after = (noise.rounded_weights(after[0], param.dtype), *after[1:])
    if spec.is_rounded:
        after = (after[0], *noise.rounded_moments(*zip(after[1:], places, strict=True)))
    changes += [(slot, new) for slot, new in zip((param, *places), after, strict=True) if slot is not None]
    if table.pending is not None:
        changes.append((table.pending.notes, torch.full_like(rows, job.note)))
    place.write(changes)
    return skipped


def _rows_second_moment(p: Tensor, r: Tensor, g: Tensor, step: Step) -> Tensor:
    """The second moment of each row after the step, as a column of numbers."""
    scalars = step.scalars
    if scalars.decay is not None:
        g = (-g if step.rule.maximize else g) + scalars.decay * p
    square = g.double().square().mean(dim=1, keepdim=True).to(g.dtype)
    after: Tensor = adam.averaged(r, square, scalars.beta2, 1 - scalars.beta2, step.as_dense or None)
    return after


def _sum_duplicates(gradient: RowGradient, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The distinct rows, ascending, and for each the sum of its occurrences, added in order of occurrence."""
    values = gradient.values.to(dtype)
    rows, position = torch.unique(gradient.rows, return_inverse=True)
    return rows, values.new_zeros(len(rows), gradient.columns).index_add_(0, position, values)


def _corrected_by(count: Tensor, step: Step, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Each row's step size and eps, as columns, from how many steps it has taken."""
    scalars = step.scalars
    first, second = adam.corrections(scalars.beta1, scalars.beta2, count.double(), torch.sqrt)
    eps = scalars.eps * second if step.as_dense else torch.full_like(second, scalars.eps)
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

    def write(self, changes: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Write these matrices into these tensors: all of them or, if it is interrupted, none."""
        before = [(tensor, self._pick(tensor)) for tensor, _ in changes]
        try:
            for tensor, values in changes:
                self._put(tensor, values)
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

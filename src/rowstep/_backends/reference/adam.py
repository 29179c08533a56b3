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
from ..._state import State, compute_dtype
from ..gate import RowUpdate
from ..outcome import Outcome
from .rounding import Noise


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
    dtype = _dtype_of(param, state, gradient)
    rows, g, skipped = _finite_rows(gradient, scalars, dtype)
    table = RowsOf(gradient.lead, rows)
    changes: list[tuple[Tensor, Tensor]] = []
    step_size: float | Tensor = scalars.step_size
    eps: float | Tensor = scalars.eps
    if scalars.per_row:
        count = table.read(state["row_step"], torch.int64) + 1
        changes.append((state["row_step"], count))
        step_size, eps = _corrected_by(count, scalars, dtype)
    places = [state.get(name) for name in _slots_of(scalars)]
    p, (m, v, u) = table.read(param, dtype), (None if place is None else table.read(place, dtype) for place in places)
    if scalars.kept.second != "element":
        r = _rows_second_moment(p, table.read(state["exp_avg_sq_row"], dtype), g, scalars)
        changes.append((state["exp_avg_sq_row"], r))
        step_size = step_size / (r.sqrt() + eps)
    after = adam.update(
        p, m, v, u, g,
        1 - scalars.beta1, scalars.beta2, 1 - scalars.beta2, eps, step_size,
        scalars.maximize or None, scalars.shrink, scalars.decay, scalars.as_dense or None,
        torch.sqrt, torch.maximum,
    )  # fmt: skip
    noise = Noise(scalars.key, rows, gradient.columns)
    if scalars.rounds_weights:
        after = (noise.rounded_weights(after[0], param.dtype), *after[1:])
    if scalars.rounds_state:
        after = (after[0], *noise.rounded_moments(*after[1:], dtype=scalars.kept.dtype))
    changes += [(place, new) for place, new in zip((param, *places), after, strict=True) if place is not None]
    if notes is not None:
        changes.append((notes.tensor, torch.full_like(rows, notes.note)))
    table.write(changes, outcome, skipped)


def _slots_of(scalars: Scalars) -> tuple[str, str, str]:
    """The names of m, v and u in a state; of what the rule does not have, one that is in no state."""
    kept = scalars.kept
    return (
        "exp_avg" if kept.first else "",
        "exp_avg_sq" if kept.second == "element" else "",
        "max_exp_avg_sq" if scalars.kept.amsgrad else "",
    )


def _dtype_of(param: Tensor, state: State, gradient: RowGradient) -> torch.dtype:
    moments = (state[name].dtype for name in ("exp_avg", "exp_avg_sq", "exp_avg_sq_row") if name in state)
    return compute_dtype(param.dtype, gradient.values.dtype, *moments)


def _finite_rows(gradient: RowGradient, scalars: Scalars, dtype: torch.dtype) -> tuple[Tensor, Tensor, int]:
    """The distinct rows that are to be stepped, their summed gradients, and how many are left out."""
    rows, g = _sum_duplicates(gradient, dtype)
    if not scalars.skip_nonfinite:
        return rows, g, 0
    finite = g.isfinite().all(dim=1)
    return rows[finite], g[finite], len(rows) - int(finite.sum())


def _rows_second_moment(p: Tensor, r: Tensor, g: Tensor, scalars: Scalars) -> Tensor:
    """The second moment of each row after the step, as a column of numbers."""
    if scalars.decay is not None:
        g = (-g if scalars.maximize else g) + scalars.decay * p
    square = g.double().square().mean(dim=1, keepdim=True).to(g.dtype)
    after: Tensor = adam.averaged(r, square, scalars.beta2, 1 - scalars.beta2, scalars.as_dense or None)
    return after


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

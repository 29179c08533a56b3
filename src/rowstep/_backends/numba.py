"""The CPU kernels, compiled by Numba at first use and cached: the host's side of them.

Tensors go in as raw addresses: reading one costs a tenth of a microsecond, building a NumPy view several, and a model
with many small tables pays that for each of them at every step. Tensors that a kernel cannot address (another device,
strides of their own) are left to the reference.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._gradient import RowGradient
from .._kernels import adam as kernels
from .._kernels import catch_up as strides
from .._kernels import group as grouping
from .._kernels import norm as norms
from .._kernels.launch import PARALLEL_FROM_BYTES, workspace
from .._kernels.parallel import launch
from .._rule import Rule
from .._schedule import Schedule
from .._state import State, compute_dtype
from . import reference
from .gate import Operands, admit_gradient, admit_notes, admit_rows, admit_table
from .outcome import Outcome

# An empty array of a type tells the kernels how to read an address. For 16-bit floats see _kernels/bits.py.
_LIKE: dict[torch.dtype, Any] = {
    torch.float16: np.empty(0, np.int16),
    torch.bfloat16: np.empty(0, np.uint16),
    torch.float32: np.empty(0, np.float32),
    torch.float64: np.empty(0, np.float64),
}


def first_outside(rows: Tensor, row_count: int) -> int | None:
    """The first of these row numbers that is not in a table of so many rows."""
    if not admit_rows(rows):
        return reference.first_outside(rows, row_count)
    position = grouping.first_outside(*_ids(rows), row_count)
    return None if position < 0 else int(rows[position])


def has_nonfinite(gradient: RowGradient) -> bool:
    """Whether the summed gradient of some row is not finite."""
    if gradient.is_empty or not admit_gradient(gradient):
        return reference.has_nonfinite(gradient)
    values = _addressable(gradient.values)
    total = _totals(1, gradient.columns, values.dtype)[0]
    arguments = (*_keys_for(gradient, parts=1), values.data_ptr(), _row_stride(values), _LIKE[values.dtype])
    return bool(kernels.any_nonfinite(total, gradient.row_count, *arguments))


def norm(gradient: RowGradient, power: float) -> float:
    """The ``power``-norm of the summed gradient, as if it were dense."""
    if gradient.is_empty or not power > 0 or not admit_gradient(gradient):
        return reference.norm(gradient, power)
    values = _addressable(gradient.values)
    threads = _threads_for(values.numel() * values.element_size())
    bounds, sums = workspace.bounds(threads), np.zeros(threads)
    totals = _totals(threads, gradient.columns, values.dtype)
    arguments = (totals, bounds, *_keys_for(gradient, parts=threads), values.data_ptr(), _row_stride(values))
    if threads == 1:
        norms.norm_part(0, power, sums, *arguments, _LIKE[values.dtype], gradient.columns)
    else:
        launch(norms.norm_parallel, threads, power, sums, *arguments, _LIKE[values.dtype], gradient.columns)
    with np.errstate(over="ignore"):  # beyond float64 the norm is inf
        return float(sums.max() if power == math.inf else sums.sum() ** (1 / power))


def update(operands: Operands, rule: Rule, outcome: Outcome) -> None:
    """Step the rows that the gradient names, in place."""
    param, _, gradient, at = operands
    if at is None:
        reference.update(operands, rule, outcome)
        return
    p_at, m_at, v_at, u_at, counts_at, dtype, state_dtype = at
    values = _addressable(gradient.values)
    threads = _threads_for(values.numel() * values.element_size())
    bounds = workspace.bounds(threads)
    arguments = (
        _totals(threads, gradient.columns, dtype, state_dtype, values.dtype),
        bounds,
        *_keys_for(gradient, parts=threads),
        p_at,
        m_at,
        v_at,
        u_at if rule.amsgrad else None,
        counts_at if rule.per_row else None,
        values.data_ptr(),
        _row_stride(values),
        _LIKE[dtype],
        _LIKE[state_dtype],
        _LIKE[values.dtype],
        gradient.columns,
        rule.beta1,
        rule.beta2,
        rule.eps,
        rule.step_size,
        rule.maximize or None,
        rule.shrink,
        rule.decay,
        rule.as_dense or None,
        rule.skip_nonfinite or None,
    )
    # Autograd does not see the writes, and must know that what it saved for a backward pass is out of date.
    torch.autograd.graph.increment_version(param)
    outcome.watch(bounds[2, :threads])
    if threads == 1:
        kernels.update_part(0, *arguments)
    else:
        launch(kernels.update_parallel, threads, *arguments)


def catch_up(param: Tensor, state: State, since: Tensor, schedule: Schedule, rows: Tensor | range) -> None:
    """Bring these rows of ``param`` and its moments from the steps in ``since`` to the schedule's."""
    lead = tuple(since.shape)
    at = admit_table(param, state, lead, amsgrad=schedule.amsgrad)
    if at is None or not (admit_notes(since, lead) and (isinstance(rows, range) or admit_rows(rows))):
        reference.catch_up(param, state, since, schedule, rows)
        return
    p_at, m_at, v_at, u_at, _, dtype, state_dtype = at
    columns = param.numel() // max(1, since.numel())
    arguments = (
        since.view(-1).numpy(),
        p_at,
        m_at,
        v_at,
        u_at if schedule.amsgrad else None,
        _LIKE[dtype],
        _LIKE[state_dtype],
        columns,
        schedule.step,
        schedule.window,
        schedule.frozen,
        schedule.rate,
        schedule.root,
        schedule.decayed,
        schedule.beta1_powers,
        schedule.beta2_powers,
        schedule.ratio,
        schedule.growth,
        schedule.eps,
    )
    threads = _threads_for(len(rows) * columns * param.element_size())
    scratch = _totals(2 * threads, columns, dtype, state_dtype).reshape(threads, 2, columns)
    if isinstance(rows, range):
        serial, parallel = strides.catch_up_range, strides.catch_up_range_parallel
        work: tuple[Any, ...] = (rows.start, rows.stop)
    else:
        serial, parallel = strides.catch_up_ids, strides.catch_up_ids_parallel
        work = _ids(rows)
    if threads == 1:
        serial(0, scratch, *work, *arguments)
    else:
        launch(parallel, threads, scratch, *work, *arguments)


def count_stale(since: Tensor, rows: Tensor, step: int) -> int:
    """How many of these row numbers name a row that is not up to date."""
    if not (admit_notes(since, tuple(since.shape)) and admit_rows(rows)):
        return reference.count_stale(since, rows, step)
    return int(strides.count_stale(since.view(-1).numpy(), *_ids(rows), step))


def mark(since: Tensor, rows: Tensor, step: int) -> None:
    """Note that these rows are up to date at this step."""
    if not (admit_notes(since, tuple(since.shape)) and admit_rows(rows)):
        reference.mark(since, rows, step)
        return
    strides.mark(since.view(-1).numpy(), *_ids(rows), step)


def _threads_for(byte_count: int) -> int:
    return 1 if byte_count < PARALLEL_FROM_BYTES else torch.get_num_threads()


def _keys_for(gradient: RowGradient, parts: int) -> tuple[int, int, int, int, Any, Any]:
    return workspace.grouping(*_ids(gradient.rows), gradient.row_count, parts)


def _totals(parts: int, columns: int, *dtypes: torch.dtype) -> Any:
    return workspace.totals(parts, columns, _LIKE[compute_dtype(*dtypes)].dtype)


def _ids(rows: Tensor) -> tuple[int, int]:
    """Where row numbers are and how many."""
    return rows.data_ptr(), rows.numel()  # len() goes through Python and takes ten times as long


def _addressable(values: Tensor) -> Tensor:
    return values if values.stride(1) == 1 else values.contiguous()


def _row_stride(values: Tensor) -> int:
    return values.stride(0) * values.element_size()

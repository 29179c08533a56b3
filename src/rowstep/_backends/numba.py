"""The CPU kernels, compiled by Numba at first use and cached: the host's side of them.

Tensors go in as raw addresses: reading one costs a tenth of a microsecond, building a NumPy view several, and a model
with many small tables pays that for each of them at every step. Only what the gate has given addresses of comes here.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._gradient import RowGradient
from .._kernels import catch_up as catching_up
from .._kernels import norm as norms
from .._kernels import update as kernels
from .._kernels import walk
from .._kernels.workspace import PARALLEL_FROM_BYTES, shared_work, workspace
from .._state import compute_dtype
from .gate import LateRows, Place, RowUpdate
from .outcome import Outcome

# An empty array of a type tells the kernels how to read an address. For bfloat16 see _kernels/floats.py.
_LIKE: dict[torch.dtype, Any] = {
    torch.bfloat16: np.empty(0, np.uint16),
    torch.float32: np.empty(0, np.float32),
    torch.float64: np.empty(0, np.float64),
}

_NOT_ENDED = np.full(1, -1)

_NO_NOTES = None, 0, 0

# A job as walk.py and update.py have it: where the gradient is, where the table, its state and notes are, how to round,
# scalars.
_JOB = struct.Struct("=16q6d")
assert _JOB.size == walk.JOB_WORDS * 8


def first_outside(rows: Tensor, row_count: int) -> int | None:
    """The first of these row numbers that is not in a table of so many rows."""
    position = walk.first_outside(rows.data_ptr(), rows.numel(), row_count)
    return None if position < 0 else int(rows.view(-1)[position])


def has_nonfinite(gradient: RowGradient) -> bool:
    """Whether the summed gradient of some row is not finite."""
    jobs, keys = _gradient_job(gradient), workspace.keys(gradient.rows.numel() + 1)
    dtype = gradient.values.dtype
    totals = _totals(1, gradient.columns, dtype)
    return bool(kernels.count_nonfinite(totals, jobs, keys.at, keys.spare_at, _LIKE[dtype]))


def norm(gradient: RowGradient, power: float) -> float:
    """The ``power``-norm of the summed gradient, as if it were dense."""
    values, jobs = gradient.values, _gradient_job(gradient)
    threads = _threads_for(values.numel() * values.itemsize)
    pieces, keys = shared_work(jobs, threads, gradient.rows.numel())
    sums = np.zeros(threads)
    totals = _totals(threads, gradient.columns, values.dtype)
    norms.norm(threads, totals, sums, power, jobs, pieces, keys.at, keys.spare_at, _LIKE[values.dtype])
    with np.errstate(over="ignore"):  # beyond float64 the norm is inf
        return float(sums.max() if power == math.inf else sums.sum() ** (1 / power))


def _gradient_job(gradient: RowGradient) -> Any:
    job = np.zeros(walk.JOB_WORDS, np.int64)
    job[:8] = gradient.at or 0  # `Backend` has looked
    return job


def update(updates: Sequence[RowUpdate], outcome: Outcome) -> None:
    """Step the rows that the gradients name, in place, all in one launch. The updates are of one kind."""
    jobs: Any = np.empty(len(updates) * walk.JOB_WORDS, np.int64)
    size = most_ids = columns = 0
    for number, each in enumerate(updates):
        where: Any = each.gradient.at
        _write_job(each, jobs, number)
        size += where[1] * where[5]
        most_ids, columns = max(most_ids, where[1]), max(columns, where[5])
    _, _, gradient, scalars, notes, at, _ = each
    dtype, m_dtype, v_dtype = at[5:8]  # type: ignore[index]  # `batches` has looked
    g_dtype, kept = gradient.values.dtype, scalars.kept
    threads = _threads_for(size * g_dtype.itemsize)
    pieces, keys = shared_work(jobs, threads, most_ids)
    totals = _totals(threads, columns, dtype, m_dtype, v_dtype, g_dtype)
    skipped = _NOT_ENDED.copy() if threads == 1 else np.full(threads, -1)
    # Autograd does not see the writes, and must know that what it saved for a backward pass is out of date.
    torch.autograd.graph.increment_version([each[0] for each in updates])
    outcome.watch(skipped)
    kernels.update(
        threads, totals, skipped, jobs, pieces, keys.at, keys.spare_at,
        _LIKE[dtype], _LIKE[m_dtype], _LIKE[v_dtype], _LIKE[g_dtype],
        kept.first or None,
        None if kept.second == "element" else True,
        scalars.kept.amsgrad or None,
        scalars.per_row or None,
        None if notes is None else True,
        scalars.maximize or None,
        None if scalars.shrink is None else True,
        None if scalars.decay is None else True,
        scalars.as_dense or None,
        scalars.skip_nonfinite or None,
        scalars.rounds_state or None,
        scalars.rounds_weights or None,
    )  # fmt: skip


def _write_job(update: RowUpdate, jobs: Any, number: int) -> None:
    _, _, gradient, scalars, notes, at, _ = update
    where: Any = gradient.at
    p_at, m_at, v_at, u_at, counts_at, _, _, _, _ = at  # type: ignore[misc]  # `batches` has looked
    _, note, notes_at = notes or _NO_NOTES
    _JOB.pack_into(
        jobs, number * _JOB.size, *where, p_at, m_at, v_at, u_at, counts_at, notes_at, note,
        scalars.key,
        scalars.beta1, scalars.beta2, scalars.eps, scalars.step_size, scalars.shrink or 0.0, scalars.decay or 0.0,
    )  # fmt: skip


def catch_up(late: LateRows, place: Place, rows: Tensor | range) -> int | None:
    """Bring these rows of a table and its moments from the steps in their notes to the schedule's."""
    p_at, m_at, v_at, u_at, _, dtype, m_dtype, v_dtype, _ = place.at
    schedule, row_count, kept = late.schedule, late.notes.numel(), late.kept
    columns = late.param.numel() // max(1, row_count)
    threads = _threads_for((len(rows) if isinstance(rows, range) else rows.numel()) * columns * dtype.itemsize)
    scratch = _totals(2 * threads, columns, dtype, m_dtype, v_dtype)
    arguments = (
        row_count, place.notes_at, p_at, m_at, v_at, u_at, columns, schedule.record, late.key,
        _LIKE[dtype], _LIKE[m_dtype], _LIKE[v_dtype],
        kept.first or None,
        None if kept.second == "element" else True,
        schedule.amsgrad or None,
        kept.is_rounded or None,
        late.rounds_weights or None,
    )  # fmt: skip
    if isinstance(rows, range):
        catching_up.catch_up_range(threads, scratch, rows.start, rows.stop, *arguments)
        return None
    work = rows.data_ptr(), rows.numel()
    if threads == 1:
        position = catching_up.catch_up_ids_part(0, scratch, *work, *arguments)
    else:
        position = walk.first_outside(*work, row_count)
        catching_up.catch_up_ids(threads, scratch, *work, *arguments)
    return None if position < 0 else int(rows.view(-1)[position])


def look_at(rows: Tensor, notes: Tensor, step: int) -> tuple[int | None, int]:
    """The first of these row numbers that is not in the table, and how many name a row that is not up to date."""
    found = catching_up.look_at_ids(rows.data_ptr(), rows.numel(), notes.numel(), notes.data_ptr(), step)
    return (int(rows[found]), 0) if found >= 0 else (None, -1 - found)


def _threads_for(byte_count: int) -> int:
    return 1 if byte_count < PARALLEL_FROM_BYTES else torch.get_num_threads()


def _totals(parts: int, columns: int, *dtypes: torch.dtype) -> Any:
    return workspace.totals(parts, columns, _LIKE[compute_dtype(*dtypes)].dtype)

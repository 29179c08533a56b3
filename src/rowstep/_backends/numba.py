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
from numba import types
from torch import Tensor

from .._gradient import RowGradient
from .._kernels import catch_up as catching_up
from .._kernels import rows as row_kernels
from .._kernels.rows import Kind
from .._kernels.workspace import PARALLEL_FROM_BYTES, launch, workspace
from .._state import compute_dtype
from .gate import LateRows, Place, RowUpdate
from .outcome import Outcome

# The types of Numba's that kernels read and write; bfloat16 travels as its bits.
_TYPES = {
    torch.bfloat16: types.uint16,
    torch.float32: types.float32,
    torch.float64: types.float64,
}

_NO_TYPE = types.float32  # of what a kernel does not touch

_NO_NOTES = None, 0, 0

_JOB = struct.Struct("=16q6d")  # as rows.py has it


def first_outside(rows: Tensor, row_count: int) -> int | None:
    """The first of these row numbers that is not in a table of so many rows."""
    position = row_kernels.first_outside(rows.data_ptr(), rows.numel(), row_count)
    return None if position < 0 else int(rows.view(-1)[position])


def has_nonfinite(gradient: RowGradient) -> bool:
    """Whether the summed gradient of some row is not finite."""
    return bool(_over_gradient(gradient, "nonfinite", threads=1).any())


def norm(gradient: RowGradient, power: float) -> float:
    """The ``power``-norm of the summed gradient, as if it were dense."""
    sums = _over_gradient(gradient, "norm", _threads_for(gradient.values.numel() * gradient.values.itemsize), power)
    with np.errstate(over="ignore"):  # beyond float64 the norm is inf
        return float(sums.max() if power == math.inf else sums.sum() ** (1 / power))


def _over_gradient(gradient: RowGradient, work: str, threads: int, power: float = 0.0) -> Any:
    """What each part of a gradient comes to."""
    rows_at, count, row_count, g_at, g_stride, columns, position_bits, row_bits = gradient.at  # type: ignore[misc]
    job, results = np.zeros(row_kernels.JOB_WORDS, np.int64), np.zeros(threads)
    job[:8] = rows_at, count, g_at, g_stride, position_bits, row_count, columns, row_bits
    dtype = gradient.values.dtype
    kind = Kind(_NO_TYPE, _NO_TYPE, _NO_TYPE, _TYPES[dtype], _TYPES[compute_dtype(dtype)], work, momentum=None)
    launch(kind, job, results, count, columns, power)
    return results


def update(updates: Sequence[RowUpdate], outcome: Outcome) -> None:
    """Step the rows that the gradients name, in place, all in one launch. The updates are of one kind."""
    jobs: Any = np.empty(len(updates) * row_kernels.JOB_WORDS, np.int64)
    size = most_ids = columns = 0
    for number, each in enumerate(updates):
        where: Any = each.gradient.at
        _write_job(each, jobs, number)
        size += where[1] * where[5]
        most_ids, columns = max(most_ids, where[1]), max(columns, where[5])
    _, _, gradient, scalars, notes, at, _ = each
    dtype, m_dtype, v_dtype = at[5:8]  # type: ignore[index]  # `batches` has looked
    g_dtype, kept = gradient.values.dtype, scalars.kept
    kind = Kind(
        _TYPES[dtype], _TYPES[m_dtype], _TYPES[v_dtype], _TYPES[g_dtype],
        _TYPES[compute_dtype(dtype, m_dtype, v_dtype, g_dtype)], "step",
        kept.first or None,
        None if kept.second == "element" else True,
        kept.amsgrad or None,
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
    skipped = np.full(_threads_for(size * g_dtype.itemsize), -1.0)
    # Autograd does not see the writes, and must know that what it saved for a backward pass is out of date.
    torch.autograd.graph.increment_version([each[0] for each in updates])
    outcome.watch(skipped)
    launch(kind, jobs, skipped, most_ids, columns)


def _write_job(update: RowUpdate, jobs: Any, number: int) -> None:
    _, _, gradient, scalars, notes, at, _ = update
    where: Any = gradient.at
    p_at, m_at, v_at, u_at, counts_at, _, _, _, _ = at  # type: ignore[misc]  # `batches` has looked
    _, note, notes_at = notes or _NO_NOTES
    rows_at, count, row_count, g_at, g_stride, columns, position_bits, row_bits = where
    _JOB.pack_into(
        jobs, number * _JOB.size, rows_at, count, g_at, g_stride, position_bits, row_count, columns, row_bits,
        p_at, m_at, v_at, u_at, counts_at, notes_at, note, scalars.key,
        scalars.beta1, scalars.beta2, scalars.eps, scalars.step_size, scalars.shrink or 0.0, scalars.decay or 0.0,
    )  # fmt: skip


def catch_up(late: LateRows, place: Place, rows: Tensor | range) -> int | None:
    """Bring these rows of a table and its moments from the steps in their notes to the schedule's."""
    p_at, m_at, v_at, u_at, _, dtype, m_dtype, v_dtype, _ = place.at
    row_count, kept, held = late.notes.numel(), late.kept, late.schedule.record
    columns = late.param.numel() // max(1, row_count)
    ids_at, first, last = (0, rows.start, rows.stop) if isinstance(rows, range) else (rows.data_ptr(), 0, rows.numel())
    threads = _threads_for((last - first) * columns * dtype.itemsize)
    number = _TYPES[compute_dtype(dtype, m_dtype, v_dtype)]
    kind = catching_up.Kind(
        _TYPES[dtype], _TYPES[m_dtype], _TYPES[v_dtype], number,
        kept.first or None,
        None if kept.second == "element" else True,
        kept.amsgrad or None,
        kept.is_rounded or None,
        late.rounds_weights or None,
    )  # fmt: skip
    arguments = (
        threads, ids_at, first, last, row_count, place.notes_at, p_at, m_at, v_at, u_at, columns, held[0], late.key,
        workspace.totals(2 * threads, columns, number),
    )  # fmt: skip
    kernel, position = catching_up.catching_up(kind), -1
    if threads == 1:
        position = kernel.part_kernel(0, *arguments)
    else:
        position = row_kernels.first_outside(ids_at, last, row_count) if ids_at else -1
        kernel(threads, *arguments)
    return None if position < 0 else int(rows.view(-1)[position])  # type: ignore[union-attr]  # a range is inside


def look_at(rows: Tensor, notes: Tensor, step: int) -> tuple[int | None, int]:
    """The first of these row numbers that is not in the table, and how many name a row that is not up to date."""
    found = catching_up.look_at_ids(rows.data_ptr(), rows.numel(), notes.numel(), notes.data_ptr(), step)
    return (int(rows[found]), 0) if found >= 0 else (None, -1 - found)


def _threads_for(byte_count: int) -> int:
    return 1 if byte_count < PARALLEL_FROM_BYTES else torch.get_num_threads()

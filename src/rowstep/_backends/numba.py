"""The CPU kernels, compiled by Numba at first use and cached: the host's side of them.

Tensors go in as raw addresses: reading one costs a tenth of a microsecond, building a NumPy view several, and a model
with many small tables pays that for each of them at every step. Who holds the tensors until a launch has returned: a
job its gradient, a table its storages, a schedule's record what it points to.
"""

from __future__ import annotations

import math
import operator
import struct
from typing import Any

import numpy as np
import torch
from numba import types
from torch import Tensor

from .._gradient import RowGradient
from .._kernels import catch_up as catching_up
from .._kernels.ids import first_flawed
from .._kernels.job import JOB_WORDS
from .._kernels.pool import OverThreads
from .._kernels.rows import Kind, over_rows
from .._kernels.window import advance
from .._kernels.workspace import launch, reserve, workspace
from .._schedule import COEFFICIENTS, Path, Window
from .._state import StateSpec, compute_dtype
from .._table import Job
from .._torch_internals import note_writes

# The types of Numba's that kernels read and write; bfloat16 travels as its bits.
_TYPES = {torch.bfloat16: types.uint16, torch.float32: types.float32, torch.float64: types.float64}

_NO_TYPE = types.float32  # of what a kernel does not touch

_WORDS = struct.Struct("=6q")  # of a gradient, as ``_kernels/job`` has them
_TABLE = struct.Struct(f"=3q{8 * (JOB_WORDS - 9)}x")  # a table of which nothing is kept
_INT64 = np.dtype(np.int64)
_PARAM = operator.attrgetter("param")
_NO_JOBS = np.empty(0, _INT64)


def words_of(gradient: RowGradient, note: int = 0) -> bytes | None:
    """What kernels are told of a gradient; None if they cannot take it. Raise if it has less memory than it says."""
    indices, values, count, columns = gradient.indices, gradient.values, gradient.count, gradient.columns
    if not values.is_cpu or values.dtype not in _TYPES or len(gradient.lead) != 1 or values.is_neg():
        return None
    stride, width = values.stride()
    if width != 1:  # kernels read whole rows
        gradient.check_memory()
        values = gradient.values = values.contiguous()
        stride = columns
    size = values.itemsize
    if (
        values.untyped_storage().nbytes() < (values.storage_offset() + (count - 1) * stride + columns) * size
        or indices.untyped_storage().nbytes() < (indices.storage_offset() + count) * 8
    ):
        gradient.check_memory()
    return _WORDS.pack(indices.data_ptr(), count, values.data_ptr(), stride * size, (count - 1).bit_length(), note)


def kernel_for(job: Job) -> OverThreads:
    """The kernel that steps this job: the same object for all that one launch can take."""
    table, step, rule = job.table, job.step, job.step.rule
    dtypes = *table.dtypes, job.gradient.values.dtype
    stored, number = [_TYPES[dtype] for dtype in dtypes], _TYPES[compute_dtype(*dtypes)]
    options = _options_of(table.spec, rule.rounds_weights_of(table.dtypes[0])) | {
        "decay": step.scalars.decay is not None,
        "as_dense": step.as_dense,
        "skip_nonfinite": rule.skips_nonfinite,
    }
    p, m, v, g = stored
    return over_rows(Kind(p, m, v, g, number, "step", **_none_if_off(options)))


def _options_of(spec: StateSpec, rounds_weights: bool) -> dict[str, bool]:
    return {
        "momentum": spec.has_momentum,
        "by_row": spec.is_by_row,
        "amsgrad": spec.amsgrad,
        "rounds_state": spec.is_rounded,
        "rounds_weights": rounds_weights,
    }


def _none_if_off(options: dict[str, bool]) -> dict[str, Any]:
    return {name: on or None for name, on in options.items()}


class Launch:
    """The jobs that one kernel makes in one call."""

    __slots__ = ("_kernel", "_room", "_told", "jobs", "memory", "words")

    def __init__(self, kernel: OverThreads) -> None:
        self._kernel, self._told = kernel, _NO_JOBS
        self.jobs: list[Job] = []
        self.words: list[bytes] = []
        self.memory: set[int] = set()

    def first_flawed(self) -> Job | None:
        """The first job that names a row outside its table, or one that waits."""
        self._told = np.frombuffer(b"".join(self.words), _INT64)
        number = first_flawed(self._told)
        return None if number < 0 else self.jobs[number]

    def reserve(self) -> None:
        """Have all the memory that it takes to run."""
        size = most_ids = columns = 0
        for job in self.jobs:
            gradient = job.gradient
            size += gradient.count * gradient.columns * gradient.values.itemsize
            most_ids, columns = max(most_ids, gradient.count), max(columns, gradient.columns)
        if self._told.size < len(self.jobs) * JOB_WORDS:  # new tables, which were checked by themselves
            self._told = _told(self.words)
        self._room = reserve(self._kernel, self._told, size, torch.get_num_threads(), most_ids, columns)

    def run(self) -> int:
        """Step the rows; return how many were skipped."""
        # Autograd does not see the writes, and must know that what it saved for a backward pass is out of date.
        note_writes(list(map(_PARAM, self.jobs)))
        skipped = launch(self._kernel, self._told, self._room)
        return int(skipped[0]) if skipped.size == 1 else int(skipped.sum())


def _told(words: list[bytes]) -> Any:
    """Jobs for a kernel, in memory of their own: a signal's handler may step while they wait."""
    return np.frombuffer(b"".join(words), _INT64)


def first_outside(gradient: RowGradient) -> int | None:
    """The first row number of a gradient that is not in its table."""
    if first_flawed(_alone(gradient)) < 0:
        return None
    rows = gradient.rows
    return int(rows[(rows < 0) | (rows >= gradient.row_count)][0])


def _alone(gradient: RowGradient) -> Any:
    """A job without a table."""
    rows = gradient.row_count
    return _told([words_of(gradient) or b"", _TABLE.pack(rows, gradient.columns, (rows - 1).bit_length())])


def has_nonfinite(gradient: RowGradient) -> bool:
    """Whether the summed gradient of some row is not finite."""
    return bool(_over_gradient(gradient, "nonfinite", most_threads=1).any())


def norm(gradient: RowGradient, power: float) -> float:
    """The ``power``-norm of the summed gradient, as if it were dense."""
    sums = _over_gradient(gradient, "norm", torch.get_num_threads(), power)
    with np.errstate(over="ignore"):  # beyond float64 the norm is inf
        return float(sums.max() if power == math.inf else sums.sum() ** (1 / power))


def _over_gradient(gradient: RowGradient, work: str, most_threads: int, power: float = 0.0) -> Any:
    """What each part of a gradient comes to."""
    dtype, told = gradient.values.dtype, _alone(gradient)
    count, columns, size = gradient.count, gradient.columns, gradient.count * gradient.columns * dtype.itemsize
    kind = Kind(_NO_TYPE, _NO_TYPE, _NO_TYPE, _TYPES[dtype], _TYPES[compute_dtype(dtype)], work, momentum=None)
    kernel = over_rows(kind)
    return launch(kernel, told, reserve(kernel, told, size, most_threads, count, columns), power)


def catch_up(pending: Any, rows: Tensor | range) -> bool:
    """Bring these rows of a table from the steps in their notes to the schedule's; False if one is not in the table."""
    table = pending.table
    schedule = pending.schedule  # a handler that steps puts another in its place
    told, *_held = schedule.timeline.told
    ids_at, first, last = (0, rows.start, rows.stop) if isinstance(rows, range) else (rows.data_ptr(), 0, rows.numel())
    columns, kernel = pending.columns, pending.kernel
    if kernel is None:
        options = _options_of(table.spec, pending.rounds_weights)
        stored, number = [_TYPES[dtype] for dtype in table.dtypes], _TYPES[compute_dtype(*table.dtypes)]
        p, m, v = stored
        kind = catching_up.Kind(p, m, v, number, **_none_if_off(options))
        kernel = pending.kernel = catching_up.catching_up(kind)
    size = (last - first) * columns * table.dtypes[0].itemsize
    threads, pace = kernel.threads_for(size, torch.get_num_threads())
    arguments = (
        threads, ids_at, first, last, pending.told, schedule.step, schedule.window, told,
        pending.key if pending.rounds else 0,
        workspace.totals(2 * threads, columns, kernel.number),
    )  # fmt: skip
    if pace is None:
        return bool(kernel.part_kernel(0, *arguments))
    if ids_at and catching_up.is_outside(ids_at, last, table.row_count):
        return False
    kernel(threads, *arguments, pace=pace)
    return True


def window_after(path: Path, window: Window, step: tuple[float, float, float], timeline: Any, number: int) -> Window:
    """The window after the ``number``-th step, which is written to the timeline unless it is there."""
    length = path.window_length
    after = Window(np.empty((7, length)), np.empty(length), np.empty((length + 1, COEFFICIENTS)))
    rate, root, kept = step
    told, *_held = timeline.told
    advance(
        window[0], window[1], *after, path.powers, told, number if number > timeline.newest else 0,
        rate, root, kept, path.tolerance, path.has_tiny_means,
    )  # fmt: skip
    return after

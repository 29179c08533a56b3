"""The CPU kernels, compiled by Numba at first use and cached: the host's side of them.

Tensors go in as raw addresses: reading one costs a tenth of a microsecond, building a NumPy view several, and a model
with many small tables pays that for each of them at every step. Until a launch has returned, a job holds its gradient,
a table its storages, and a schedule's record what it points to.
"""

from __future__ import annotations

import functools
import math
import struct
from typing import Any

import numpy as np
import torch
from numba import types
from torch import Tensor

from .._gradient import RowGradient
from .._kernels import catch_up as catching_up
from .._kernels.ids import places_among as finding_places
from .._kernels.job import JOB_WORDS
from .._kernels.pool import OverThreads
from .._kernels.rows import Kind, over_rows
from .._kernels.share import SHARE_BITS
from .._kernels.window import advance
from .._kernels.workspace import Workspace, borrow
from .._memory import data_address
from .._schedule import Path, Window
from .._state import compute_dtype
from .._table import Job, Table
from .._torch_internals import note_writes
from . import reference

# The types of Numba's that kernels read and write; bfloat16 travels as its bits.
_TYPES = {torch.bfloat16: types.uint16, torch.float32: types.float32, torch.float64: types.float64}

_NO_TYPE = types.float32  # of what a kernel does not touch

_WORDS = struct.Struct("=6q")  # of a gradient, as ``_kernels/job`` has them
_TABLE = struct.Struct(f"=4q{8 * (JOB_WORDS - 10)}x")  # a table of which nothing is kept; sums in place of weights
_CATCH_UP = struct.Struct(f"={catching_up.TOLD_WORDS}q")


reports_late = False  # what is wrong with a gradient is known before a row moves


def runs_on(device: torch.device) -> bool:
    """Whether the kernels can read what lies on this device."""
    return device.type == "cpu"


def words_of(gradient: RowGradient, note: int = 0) -> bytes | None:
    """What kernels are told of a gradient; None if they cannot take it. Raise if its memory was freed."""
    values, count = gradient.values, gradient.count
    if values.dtype not in _TYPES or len(gradient.lead) != 1 or values.is_neg():
        return None
    stride, width = values.stride()
    if width != 1:  # kernels read whole rows
        gradient.check_memory()
        values = gradient.values = values.contiguous()
        stride = gradient.columns
    indices, itemsize = gradient.indices, values.itemsize
    rows_at, values_at = indices.data_ptr(), values.data_ptr()
    # As ``data_address`` tells, of which two calls take a hundredth of a small step.
    if rows_at == indices.storage_offset() * 8 or values_at == values.storage_offset() * itemsize:
        gradient.check_memory()
        return None  # a fake tensor, say, which only looks as if it had some
    return _WORDS.pack(rows_at, count, values_at, stride * itemsize, (count - 1).bit_length(), note)


def kernel_for(job: Job) -> OverThreads:
    """The kernel that steps this job: the same object for all that one launch can take."""
    table, step, rule = job.table, job.step, job.step.rule
    dtypes = *table.dtypes, job.gradient.values.dtype
    stored, number = [_TYPES[dtype] for dtype in dtypes], _TYPES[compute_dtype(*dtypes)]
    options = _options_of(table, rule.rounds_weights_of(table.dtypes[0])) | {
        "decay": step.scalars.decay is not None,
        "as_dense": step.as_dense,
        "skip_nonfinite": rule.skips_nonfinite,
    }
    p, m, v, g = stored
    return over_rows(Kind(p, m, v, g, number, "step", **_none_if_off(options)))


def _options_of(table: Table, rounds_weights: bool) -> dict[str, bool]:
    spec = table.spec
    return {
        "momentum": spec.has_momentum,
        "by_row": spec.is_by_row,
        "amsgrad": spec.amsgrad,
        "rounds_state": spec.rounds_moments_of(*table.dtypes[1:]),
        "rounds_weights": rounds_weights,
    }


def _none_if_off(options: dict[str, bool]) -> dict[str, Any]:
    return {name: on or None for name, on in options.items()}


class Launch(Workspace):
    """The jobs of a step that one kernel makes in one call."""

    __slots__ = ("jobs", "memory", "params")

    def __init__(self) -> None:
        super().__init__()
        self.jobs: list[Job] = []
        self.params: list[Tensor] = []
        self.memory: set[int] = set()
        """Where the storages of the tables begin."""

    def first_flawed(self) -> Job | None:
        """The first job that names a row outside its table, or one that waits."""
        number = self.check()
        return None if number < 0 else self.jobs[number]

    def step(self) -> int:
        """Step the rows; return how many were skipped."""
        # Autograd does not see the writes, and must know that what it saved for a backward pass is out of date.
        note_writes(self.params)
        skipped = self.run()
        for each in (self.jobs, self.params, self.memory):
            each.clear()
        self.give_back()
        return skipped


class LaunchAhead(Launch):
    """A launch of one job, for a table of which the next rows were announced: checked here, made by a thread."""

    __slots__ = ()

    def reserve(self, most_threads: int, power: float = 0.0) -> None:
        """Each part will have memory of its own. A dense gradient has it now: zero_grad and autograd write into it."""
        (job,) = self.jobs
        if job.param.grad is not None and not job.param.grad.is_sparse:
            job.gradient.values = job.gradient.values.clone()

    def step(self) -> int:
        """Let the rows be stepped. How many were skipped, is told when they have been."""
        (job,) = self.jobs
        step_rows, skipped = functools.partial(_step_part, self.kernel, job.table.words), 0
        if job.table.ahead is not None:
            job.table.ahead.step(job, step_rows)
        else:  # this step has made a table over the same memory, and two threads may not step both
            note_writes(self.params)
            skipped = step_rows(job, job.gradient)
        for each in (self.jobs, self.params, self.memory):
            each.clear()
        self.give_back()
        return skipped


def _step_part(kernel: OverThreads, words_of_table: bytes, job: Job, gradient: RowGradient) -> int:
    """Step the rows of a part of a job's gradient; return how many were skipped."""
    count, columns = gradient.count, gradient.columns
    words: Any = words_of(gradient, job.note)
    if not count:
        return 0
    workspace = borrow(Workspace, kernel)
    workspace.add(count, columns, count * columns * gradient.values.itemsize, words, words_of_table, job.step.words)
    if workspace.check() >= 0:
        raise RuntimeError("the row numbers of the gradient have changed since the step")
    workspace.reserve(torch.get_num_threads())
    skipped = workspace.run()
    workspace.give_back()
    return skipped


def places_among(rows: Tensor, distinct: Tensor) -> Tensor:
    """For each row its place among distinct ones, which ascend; -1 if it is not there."""
    places = torch.empty_like(rows)
    finding_places.call(rows.data_ptr(), len(rows), distinct.data_ptr(), len(distinct), places.data_ptr())
    return places


def first_outside(gradient: RowGradient) -> int | None:
    """The first row number of a gradient that is not in its table."""
    workspace = _alone(gradient)
    is_inside = workspace.check() < 0
    workspace.give_back()
    if is_inside:
        return None
    rows = gradient.rows
    return int(rows[(rows < 0) | (rows >= gradient.row_count)][0])


def _alone(gradient: RowGradient, kernel: OverThreads | None = None, sums_at: int = 0) -> Workspace:
    """A workspace for a gradient without a table."""
    workspace, rows, count, columns = borrow(Workspace, kernel), gradient.row_count, gradient.count, gradient.columns
    table = _TABLE.pack(rows, columns, (rows - 1).bit_length(), sums_at)
    workspace.add(count, columns, count * columns * gradient.values.itemsize, words_of(gradient) or b"", table)
    return workspace


def norm(gradient: RowGradient, power: float) -> float:
    """The ``power``-norm of the summed gradient, as if it were dense."""
    sums = np.zeros(1 << SHARE_BITS)  # by the upper bits of the rows, so that it does not matter who sums what
    dtype = gradient.values.dtype
    kind = Kind(_NO_TYPE, _NO_TYPE, _NO_TYPE, _TYPES[dtype], _TYPES[compute_dtype(dtype)], "norm", momentum=None)
    workspace = _alone(gradient, over_rows(kind), sums.ctypes.data)
    workspace.check()
    workspace.reserve(torch.get_num_threads(), power)
    workspace.run()
    workspace.give_back()
    with np.errstate(over="ignore"):  # beyond float64 the norm is inf
        return float(sums.max() if power == math.inf else sums.sum() ** (1 / power))


def catch_up_in_finalizer(pending: Any, rows: range) -> bool:
    """``catch_up`` where nothing may be compiled and no lock waited for: on this thread alone, by machine code or not
    by kernels at all.
    """
    if pending.kernel is None or not pending.kernel.kernel.is_compiled:
        return reference.catch_up(pending, rows)
    return catch_up(pending, rows, most_threads=1)


def catch_up(pending: Any, rows: Tensor | range, most_threads: int = 0) -> bool:
    """Bring these rows of a table from the steps in their notes to the schedule's; False if one is not in the table.

    On as many threads as torch has, unless told otherwise.
    """
    table, kernel, columns = pending.table, pending.kernel, pending.columns
    schedule = pending.schedule  # a handler that steps puts another in its place
    if isinstance(rows, range):
        ids_at, first, last = 0, rows.start, rows.stop
    else:
        ids_at, first, last = data_address(rows), 0, rows.numel()
        if last and not ids_at:
            return reference.catch_up(pending, rows)
    if kernel is None:
        options = _options_of(table, pending.rounds_weights)
        stored, number = [_TYPES[dtype] for dtype in table.dtypes], _TYPES[compute_dtype(*table.dtypes)]
        p, m, v = stored
        kind = catching_up.Kind(p, m, v, number, **_none_if_off(options))
        kernel = pending.kernel = catching_up.catching_up(kind)
    threads, pace, most_threads = 1, None, most_threads or torch.get_num_threads()
    if most_threads > 1:
        threads, pace = kernel.threads_for((last - first) * columns * table.dtypes[0].itemsize, most_threads)
    if threads > 1 and ids_at and catching_up.is_outside.call(ids_at, last, table.row_count):
        return False
    workspace, row_bytes = borrow(Workspace), (columns * kernel.number.bitwidth // 8 + 63) & -64
    told = _CATCH_UP.pack(
        threads, ids_at, first, last, schedule.step, schedule.window_at, schedule.timeline.told_at,
        pending.key if pending.rounds else 0, row_bytes,
    )  # fmt: skip
    told_at = workspace.tell(told + table.words, 2 * threads * row_bytes)
    is_inside = True
    if threads > 1:
        kernel.run(threads, told_at, pace)
    else:
        is_inside = bool(kernel.kernel.call(0, told_at))
    workspace.give_back()
    return is_inside


def window_after(path: Path, window: Window, step: tuple[float, float, float], timeline: Any, number: int) -> Window:
    """The window after the ``number``-th step, which is written to the timeline unless it is there."""
    after = Window(path.window_length)
    advance.call(window.at, after.at, timeline.told_at, number if number > timeline.newest else 0, *step)
    return after

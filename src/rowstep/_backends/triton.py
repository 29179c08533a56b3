"""The GPU kernels, compiled by Triton at first use: the host's side of them.

Nothing here waits for the device. What a step would have to wait for, an id outside of its table or a row that was not
up to date, is written by the kernels into pinned memory of the host, and raised by the next step (``reports``).

Under Triton's interpreter (``TRITON_INTERPRET=1``) the same kernels run on the CPU, one program after another.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, MutableMapping
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from .._gradient import RowGradient
from .._schedule import COEFFICIENTS, DUST_OF_EPS, Schedule, window_after
from .._state import compute_dtype
from .._table import OF_KERNELS, Job
from .._torch_internals import note_writes
from .._triton import catch_up as catching_up
from .._triton import rows as over_rows
from .reference import catch_up_in_finalizer
from .reports import Report

__all__ = ["Report", "catch_up_in_finalizer", "window_after"]

# NVIDIA's and AMD's devices are both "cuda" to torch.
_DEVICE = "cpu" if triton.knobs.runtime.interpret else "cuda"

_NUMBERS = {torch.float32: tl.float32, torch.float64: tl.float64}
_MOST_PROGRAMS = 1 << 23  # of a launch: AMD's devices count threads in 32 bits, and a program has up to 256

reports_late = True


def runs_on(device: torch.device) -> bool:
    """Whether the kernels can read what lies on this device."""
    if device.type == _DEVICE == "cuda" and torch.version.hip is None:
        return torch.cuda.get_device_capability(device) >= (7, 0)  # the oldest that Triton compiles for
    return device.type == _DEVICE


def _refuse_capture(reason: str) -> None:
    if _DEVICE == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"a CUDA graph is captured, which {reason} outside of it")


def _compiled(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> Callable[[], Any]:
    """What launches a kernel, compiled and loaded: whatever can fail has failed before anything is written."""
    options["enable_fp_fusion"] = True  # Triton 3.9 warns that it will not be the default
    compiled = kernel.run(*args, grid=grid, warmup=True, **options)
    if compiled is None:  # by the interpreter
        return functools.partial(kernel[grid], *args, **options)
    constants = [options[name] for name in kernel.arg_names[len(args) :]]
    return functools.partial(compiled[grid + (1,) * (3 - len(grid))], *args, *constants)


def words_of(gradient: RowGradient, note: int = 0) -> bytes | None:
    """None if the kernels cannot take a gradient. They are told of it when they are launched."""
    values, is_taken = gradient.values, gradient.count <= _MOST_PROGRAMS and len(gradient.lead) == 1
    return b"" if is_taken and values.dtype in OF_KERNELS and not values.is_neg() else None


def kernel_for(job: Job) -> type[Launch]:
    """The same for all jobs: in a launch, each is launched by itself."""
    return Launch


def borrow(kind: type[Launch], kernel: Any) -> Launch:
    """A launch without jobs."""
    return kind()


class Launch:
    """The jobs of a step. Each takes one sort and one kernel or, with enough ids for long runs, two."""

    def __init__(self) -> None:
        self.jobs, self.params, self.memory = list[Job](), list[Tensor](), set[int]()

    def add(self, *told: Any) -> None:
        """Called when a job has been added, with what the kernels for the CPU are told. Here the job says it all."""

    def first_flawed(self) -> Job | None:
        """The first job whose table had something wrong in an earlier step."""
        return next((job for job in self.jobs if not job.table.report.is_empty), None)

    def reserve(self, most_threads: int) -> None:
        """Sort the row numbers, and have all the memory and the kernels that it takes to run."""
        _refuse_capture("cannot count steps; expected a step")
        self._launches = list[list[Callable[[], Any]]]()
        for job in self.jobs:
            with torch.cuda.device_of(job.param):  # type: ignore[no-untyped-call]
                self._launches.append(_launches_of(job))

    def step(self) -> int:
        """Step the rows; return 0: how many were skipped is in the reports."""
        note_writes(self.params)  # autograd does not see them
        for job, launches in zip(self.jobs, self._launches, strict=True):
            with torch.cuda.device_of(job.param):  # type: ignore[no-untyped-call]
                for launch in launches:
                    launch()
        return 0


def _block_of(width: int) -> tuple[int, int]:
    """How many columns a program has in registers at a time, and in how many warps."""
    block: int = min(triton.next_power_of_2(width), 1024)
    return block, max(1, block // 256)


def _logs(betas: tuple[float, float]) -> list[float]:
    return [math.log(beta) if beta else -math.inf for beta in betas]


class _Sorted:
    """A gradient with its row numbers sorted, as kernels are told of it."""

    def __init__(self, gradient: RowGradient, *dtypes: torch.dtype) -> None:
        dtype = compute_dtype(gradient.values.dtype, *dtypes)
        self.count, self.width, self.number = gradient.count, gradient.columns, _NUMBERS[dtype]
        rows, order = torch.sort(gradient.rows, stable=True)
        self.block, self.warps = _block_of(self.width)
        whole, chunks = self.count // over_rows.CHUNK, None
        if whole:
            chunks = torch.empty(whole, self.width, dtype=dtype, device=rows.device)
        self.told = (chunks, gradient.values, *gradient.values.stride(), order, rows, self.count, self.width)
        self.launches = list[Callable[[], Any]]()
        """What sums the chunks that lie in one row, if there are any."""
        if whole:
            self.launches.append(_compiled(
                over_rows.sum_chunks, (whole, triton.cdiv(self.width, self.block)), *self.told,
                N=self.number, BLOCK=self.block, num_warps=self.warps,
            ))  # fmt: skip


def _launches_of(job: Job) -> list[Callable[[], Any]]:
    """What steps the rows of a job."""
    table, step, scalars, rule = job.table, job.step, job.step.scalars, job.step.rule
    slots, spec, pending, report = table.slots, table.spec, table.pending, table.report
    some = _Sorted(job.gradient, *table.dtypes)
    if pending is not None and pending.kernel is None:  # right behind its steps, a table may bring rows up to date
        nothing = torch.empty(0, dtype=torch.float64, device=table.param.device)
        pending.kernel = _catch_up_of(pending, None, range(1), nothing, nothing)
    return [*some.launches, _compiled(
        over_rows.step_rows, (some.count,),
        table.param, slots.get("exp_avg"), slots["exp_avg_sq_row" if spec.is_by_row else "exp_avg_sq"],
        slots.get("max_exp_avg_sq"), slots.get("row_step"), None if pending is None else pending.notes,
        *some.told, table.row_count, report.outside,
        report.skipped(some.count) if rule.skips_nonfinite else None,
        None if pending is None else report.stale(some.count),
        job.note, step.key, *_logs(rule.betas),
        1 - scalars.beta1, scalars.beta2, 1 - scalars.beta2, scalars.eps, scalars.step_size,
        1.0 if scalars.shrink is None else scalars.shrink, scalars.decay or 0.0, -1.0 if rule.maximize else 1.0,
        HAS_DECAY=scalars.decay is not None, AS_DENSE=step.as_dense or None, BY_ROW=spec.is_by_row,
        ROUNDS_STATE=spec.rounds_moments_of(*table.dtypes[1:]), ROUNDS_WEIGHTS=rule.rounds_weights_of(table.dtypes[0]),
        N=some.number, BLOCK=some.block, IS_WIDE=some.width > some.block, num_warps=some.warps,
    )]  # fmt: skip


def first_outside(gradient: RowGradient) -> int | None:
    """None: the kernels report it. To look here would be to wait."""
    return None


def norm(gradient: RowGradient, power: float) -> Tensor:
    """The ``power``-norm of the summed gradient, as if it were dense: a Tensor, which nobody has waited for."""
    with torch.cuda.device_of(gradient.values):  # type: ignore[no-untyped-call]
        some = _Sorted(gradient)
        sums = torch.empty(some.count, dtype=torch.float64, device=gradient.values.device)
        norm_rows = _compiled(
            over_rows.norm_rows, (some.count,), *some.told, sums, power,
            IS_LARGEST=power == math.inf, IS_SQUARE=power == 2, N=some.number, BLOCK=some.block, num_warps=some.warps,
        )  # fmt: skip
        for launch in (*some.launches, norm_rows):
            launch()
    return sums.max() if power == math.inf else sums.sum() ** (1 / power)


def catch_up(pending: Any, rows: Tensor | range) -> bool:
    """Bring these rows of a table from the steps in their notes to the schedule's; True: ids outside are reported."""
    if not len(rows) or not pending.columns:
        return True
    _refuse_capture("would bring rows up to one step for ever; expected reads of a deferred table")
    ids, numbers = (None, rows) if isinstance(rows, range) else (torch.sort(rows).values, range(len(rows)))
    with torch.cuda.device_of(pending.table.param):  # type: ignore[no-untyped-call]
        window, ring = _on_device(pending.schedule, pending.table.param.device)
        for first in numbers[::_MOST_PROGRAMS]:
            some = range(first, min(numbers.stop, first + _MOST_PROGRAMS))
            _catch_up_of(pending, ids, some, window, ring)()
    return True


def _catch_up_of(pending: Any, ids: Tensor | None, some: range, window: Tensor, ring: Tensor) -> Callable[[], Any]:
    """What brings some of these ids up to date, or of all rows if there are no ids."""
    table, schedule, path = pending.table, pending.schedule, pending.schedule.path
    slots, spec, dtype = table.slots, table.spec, compute_dtype(*table.dtypes)
    smallest = torch.finfo(dtype).smallest_normal
    block, warps = _block_of(pending.columns)
    return _compiled(
        catching_up.catch_up_rows, (len(some),),
        table.param, slots.get("exp_avg"), slots["exp_avg_sq_row" if spec.is_by_row else "exp_avg_sq"],
        slots.get("max_exp_avg_sq"), pending.notes,
        ids, some.start, len(some) if ids is None else len(ids), table.row_count, pending.columns, table.report.outside,
        window, ring, path.window_length, path.capacity, schedule.step, pending.key if pending.rounds else 0,
        *_logs(path.betas), path.ratio, path.growth, path.eps, min(smallest, path.eps * DUST_OF_EPS), smallest,
        BY_ROW=spec.is_by_row, ROUNDS_STATE=spec.rounds_moments_of(*table.dtypes[1:]),
        ROUNDS_WEIGHTS=pending.rounds_weights, N=_NUMBERS[dtype], BLOCK=block, num_warps=warps,
    )  # fmt: skip


_windows: MutableMapping[Schedule, dict[Any, tuple[Tensor, Tensor]]] = weakref.WeakKeyDictionary()
_rings: MutableMapping[Any, dict[Any, _Ring]] = weakref.WeakKeyDictionary()
"""What was sent by each stream, as others do not wait for it: the window of a schedule, and a timeline's every step."""


def _on_device(schedule: Schedule, device: torch.device) -> tuple[Tensor, Tensor]:
    """The window of a schedule and the ring of its timeline, as ``catch_up_rows`` takes them."""
    stream = None if device.type == "cpu" else torch.cuda.current_stream(device)
    there = _windows.setdefault(schedule, {})
    if stream not in there:
        ring = _rings.setdefault(schedule.timeline, {}).setdefault(stream, _Ring())
        with torch.inference_mode(False):  # or no later step could write to the ring
            there[stream] = _sent(schedule.window, device), ring.up_to_date(schedule, device)
    return there[stream]


class _Ring:
    """A timeline on a device: of each step the coefficients frozen for it, its rate, its root and what decay leaves."""

    def __init__(self) -> None:
        self._newest, self._ring = -1, torch.empty(0)

    def up_to_date(self, schedule: Schedule, device: torch.device) -> Tensor:
        timeline, length, capacity = schedule.timeline, schedule.path.window_length, schedule.path.capacity
        newest, frozen = timeline.newest, timeline.frozen.view(np.int64)
        columns = (timeline.rate.view(np.int64), timeline.root.view(np.int64), timeline.log_kept)
        if newest == self._newest + 1:  # by far the most frequent: one step, and one entry frozen
            slot, leaving = newest % capacity, (newest - length) % capacity
            sent = _sent(np.hstack((frozen[leaving], *(column[slot] for column in columns))), device)
            self._ring[leaving, :COEFFICIENTS].copy_(sent[:COEFFICIENTS])
            self._ring[slot, COEFFICIENTS:].copy_(sent[COEFFICIENTS:])
        elif newest != self._newest:
            self._ring = _sent(np.column_stack((frozen, *columns)), device)
        self._newest = newest
        return self._ring


def _sent(numbers: Any, device: torch.device) -> Tensor:
    """An array on its way to a device, through pinned memory, so that nothing waits; on the CPU, a copy."""
    tensor = torch.from_numpy(numbers)
    return tensor.clone() if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)

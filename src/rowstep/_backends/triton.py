"""The GPU kernels, compiled by Triton at first use: the host's side of them.

Nothing here waits for the device. What a step would have to wait for, an id outside of its table or a row that was not
up to date, is written by the kernels into pinned memory of the host, and raised by the next step (``Report``).

Under Triton's interpreter (``TRITON_INTERPRET=1``) the same kernels run on the CPU, one program after another.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import MutableMapping
from typing import Any, ClassVar

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
from .reference import catch_up_in_finalizer, has_nonfinite

__all__ = ["catch_up_in_finalizer", "has_nonfinite", "window_after"]

# NVIDIA's and AMD's devices are both "cuda" to torch.
_DEVICE = "cpu" if triton.knobs.runtime.interpret else "cuda"

_NUMBERS = {torch.float32: tl.float32, torch.float64: tl.float64}
_MOST_PROGRAMS = 1 << 23  # of a launch: AMD's devices count threads in 32 bits, and a program has up to 256

reports_late = True  # see ``Report``


def runs_on(device: torch.device) -> bool:
    """Whether the kernels can read what lies on this device."""
    if device.type == _DEVICE == "cuda" and torch.version.hip is None:
        return torch.cuda.get_device_capability(device) >= (7, 0)  # the oldest that Triton compiles for
    return device.type == _DEVICE


class Report:
    """What kernels find wrong with the gradients of one table. The host reads it without waiting for the device."""

    _retired: ClassVar[dict[torch.device, list[Tensor]]] = {}

    def __init__(self, device: torch.device) -> None:
        self._device, self._is_pinned = device, device.type != "cpu"
        # The latter two by program: arrays that grow with the number of ids in a step.
        self._outside, self._skipped, self._stale = list[Tensor](), list[Tensor](), list[Tensor]()

    def __del__(self) -> None:
        """Keep what kernels may still write to until somebody waits: torch knows of no stream that uses it."""
        if self._is_pinned:
            self._retired.setdefault(self._device, []).extend((*self._outside, *self._stale))

    @property
    def outside(self) -> Tensor:
        """Where an id that is not in the table goes: itself if it is negative, else one more; 0 if there is none."""
        return _places(self._outside, 1, dtype=torch.int64, device="cpu", pin_memory=self._is_pinned)

    def skipped(self, count: int) -> Tensor:
        """Where each of so many programs counts the rows that it skips."""
        return _places(self._skipped, count, dtype=torch.int64, device=self._device)

    def stale(self, count: int) -> Tensor:
        """Where each of so many programs notes that its row was not up to date."""
        return _places(self._stale, count, dtype=torch.int8, device="cpu", pin_memory=self._is_pinned)

    @property
    def skipped_rows(self) -> int:
        """How many rows were skipped so far."""
        return sum(int(places.sum()) for places in self._skipped)

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been found wrong as yet."""
        return not any(places.numpy().any() for places in (*self._outside, *self._stale))

    def taken(self) -> tuple[int | None, int]:
        """An id outside of the table, if there was one, and how many rows were stale; the report is empty then."""
        found, stale = (sum(int(places.numpy().sum()) for places in some) for some in (self._outside, self._stale))
        for places in (*self._outside, *self._stale):
            places.numpy().fill(0)
        return (found - (found > 0) if found else None), stale

    def wait(self) -> None:
        """Wait for the steps that have been launched."""
        if self._is_pinned:
            retired = self._retired.pop(self._device, None)  # before: what retires meanwhile may not be done
            torch.cuda.synchronize(self._device)
            del retired


def _places(arrays: list[Tensor], count: int, **options: Any) -> Tensor:
    if not arrays or len(arrays[-1]) < count:
        arrays.append(torch.zeros(triton.next_power_of_2(count), **options))
    return arrays[-1]


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
        """Sort the row numbers, and have all the memory that it takes to run."""
        if _DEVICE == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a CUDA graph is captured, which cannot count steps; expected a step outside of it")
        self._sorted = [_Sorted(job.gradient, *job.table.dtypes) for job in self.jobs]

    def step(self) -> int:
        """Step the rows; return 0: how many were skipped is in the reports."""
        note_writes(self.params)  # autograd does not see them
        for job, some in zip(self.jobs, self._sorted, strict=True):
            with torch.cuda.device_of(job.param):  # type: ignore[no-untyped-call]
                some.sum_chunks()
                _step(job, some)
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
        self.chunks = None
        if self.count >= over_rows.CHUNK:
            self.chunks = torch.empty(self.count // over_rows.CHUNK, self.width, dtype=dtype, device=rows.device)
        self.told = (self.chunks, gradient.values, *gradient.values.stride(), order, rows, self.count, self.width)

    def sum_chunks(self) -> None:
        """Sum what lies in whole chunks of one row."""
        if self.chunks is not None:
            grid = len(self.chunks), triton.cdiv(self.width, self.block)
            over_rows.sum_chunks[grid](*self.told, N=self.number, BLOCK=self.block, num_warps=self.warps)


def _step(job: Job, some: _Sorted) -> None:
    table, step, scalars, rule = job.table, job.step, job.step.scalars, job.step.rule
    slots, spec, pending, report = table.slots, table.spec, table.pending, table.report
    over_rows.step_rows[(some.count,)](
        table.param, slots.get("exp_avg"), slots["exp_avg_sq_row" if spec.is_by_row else "exp_avg_sq"],
        slots.get("max_exp_avg_sq"), slots.get("row_step"), None if pending is None else pending.notes,
        *some.told, table.row_count, report.outside,
        report.skipped(some.count) if rule.skips_nonfinite else None,
        None if pending is None else report.stale(some.count),
        job.note, step.key, *_logs(rule.betas),
        1 - scalars.beta1, scalars.beta2, 1 - scalars.beta2, scalars.eps, scalars.step_size,
        1.0 if scalars.shrink is None else scalars.shrink, scalars.decay or 0.0, -1.0 if rule.maximize else 1.0,
        HAS_DECAY=scalars.decay is not None, AS_DENSE=step.as_dense or None, BY_ROW=spec.is_by_row,
        ROUNDS_STATE=spec.is_rounded, ROUNDS_WEIGHTS=rule.rounds_weights_of(table.dtypes[0]), N=some.number,
        BLOCK=some.block, IS_WIDE=some.width > some.block, num_warps=some.warps,
    )  # fmt: skip


def first_outside(gradient: RowGradient) -> int | None:
    """None: the kernels report it. To look here would be to wait."""
    return None


def norm(gradient: RowGradient, power: float) -> Tensor:
    """The ``power``-norm of the summed gradient, as if it were dense: a Tensor, which nobody has waited for."""
    some = _Sorted(gradient)
    sums = torch.empty(some.count, dtype=torch.float64, device=gradient.values.device)
    with torch.cuda.device_of(sums):  # type: ignore[no-untyped-call]
        some.sum_chunks()
        over_rows.norm_rows[(some.count,)](
            *some.told, sums, power, IS_LARGEST=power == math.inf, IS_SQUARE=power == 2, N=some.number,
            BLOCK=some.block, num_warps=some.warps,
        )  # fmt: skip
    return sums.max() if power == math.inf else sums.sum() ** (1 / power)


def catch_up(pending: Any, rows: Tensor | range) -> bool:
    """Bring these rows of a table from the steps in their notes to the schedule's; True: ids outside are reported."""
    table, schedule = pending.table, pending.schedule
    if not len(rows) or not pending.columns:
        return True
    ids, numbers = (None, rows) if isinstance(rows, range) else (torch.sort(rows).values, range(len(rows)))
    path, slots, spec = schedule.path, table.slots, table.spec
    dtype = compute_dtype(*table.dtypes)
    smallest = torch.finfo(dtype).smallest_normal
    block, warps = _block_of(pending.columns)
    with torch.cuda.device_of(table.param):  # type: ignore[no-untyped-call]
        window, ring = _on_device(schedule, table.param.device)
        for first in numbers[::_MOST_PROGRAMS]:
            catching_up.catch_up_rows[(min(numbers.stop - first, _MOST_PROGRAMS),)](
                table.param, slots.get("exp_avg"), slots["exp_avg_sq_row" if spec.is_by_row else "exp_avg_sq"],
                slots.get("max_exp_avg_sq"), pending.notes,
                ids, first, len(rows), table.row_count, pending.columns, table.report.outside,
                window, ring, path.window_length, path.capacity, schedule.step, pending.key if pending.rounds else 0,
                *_logs(path.betas), path.ratio, path.growth, path.eps, min(smallest, path.eps * DUST_OF_EPS), smallest,
                BY_ROW=spec.is_by_row, ROUNDS_STATE=spec.is_rounded, ROUNDS_WEIGHTS=pending.rounds_weights,
                N=_NUMBERS[dtype], BLOCK=block, num_warps=warps,
            )  # fmt: skip
    return True


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

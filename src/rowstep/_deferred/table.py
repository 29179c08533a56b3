"""One parameter whose rows wait: which step each row has reached, and the schedule it has to make up for."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor

from .._backends import Backend
from .._schedule import Schedule
from .._state import MOMENTS, State

# How far, relative to a row's own deferred move, the series may be off before terms are added one by one.
_TOLERANCE = {torch.float64: 1e-15}
_TOLERANCE_BELOW_FLOAT64 = 1e-9

# Notes per row are 32-bit numbers.
_LAST_STEP = (1 << 31) - 2


# The options that a row's path depends on besides lr and weight decay: betas, eps, amsgrad.
Options = tuple[tuple[float, float], float, bool]


class StaleRowsError(RuntimeError):
    """A gradient names rows that were not up to date when they were read. Nothing was changed."""


def is_only_traced(ids: Tensor | None = None) -> bool:
    """Whether tensors are fake just now, for the sake of their shapes: then no row is read, and none can be moved."""
    return isinstance(ids, FakeTensor) or (torch._C._len_torch_dispatch_stack() > 0 and detect_fake_mode() is not None)


class Table:
    """The deferred steps of one parameter, under options and over rows that do not change.

    Where options or rows do change, every row is brought up to date first, and then no row waits: the table is dropped,
    and another begins with the next step.
    """

    def __init__(self, param: Tensor, state: State, lead: tuple[int, ...], options: Options, step: int) -> None:
        self.param, self.state, self.options = param, state, options
        self._moments = {key: state[key] for key in MOMENTS if key in state}
        """What rows wait under, whatever becomes of the state."""
        self.lead, self.row_count, self.dtype = lead, math.prod(lead), param.dtype
        betas, eps, amsgrad = options
        tolerance = _TOLERANCE.get(param.dtype, _TOLERANCE_BELOW_FLOAT64)
        self.schedule = Schedule(betas, eps, amsgrad=amsgrad, step=step, tolerance=tolerance)
        self.since = torch.zeros(lead, dtype=torch.int32, device=param.device)
        """Per row, the step of the schedule at which it was last up to date."""
        self._swept = 0

    @property
    def step(self) -> int:
        """How many steps this parameter has taken."""
        return self.schedule.origin + self.schedule.step

    def is_of(self, state: State | None) -> bool:
        """Whether this is the state under which rows wait, and nobody has replaced what is in it."""
        return state is self.state and all(state.get(key) is moment for key, moment in self._moments.items())

    @property
    def is_full(self) -> bool:
        """Whether the notes per row are about to run out of numbers."""
        return self.schedule.step >= _LAST_STEP

    def count_stale(self, rows: Tensor, backend: Backend) -> int:
        """How many of these row numbers name a row that is not up to date."""
        return backend.count_stale(self.since, rows, self.schedule.step)

    def catch_up(self, rows: Tensor, backend: Backend) -> None:
        """Bring these rows up to date."""
        backend.catch_up(self.param, self._moments, self.since, self.schedule, rows)

    def flush(self, backend: Backend) -> None:
        """Bring every row up to date."""
        if is_only_traced():
            return
        backend.catch_up(self.param, self._moments, self.since, self.schedule, range(self.row_count))

    def advance(
        self, step: int, rows: Tensor | None, lr: float | Tensor, weight_decay: float, backend: Backend
    ) -> None:
        """Count the step that has moved these rows, or all of them, and let the others wait.

        ``step`` is how many the parameter has taken then. If this is interrupted, a second call takes it to its end.
        """
        self.schedule.advance(lr, weight_decay, to=step - self.schedule.origin)
        if rows is None:
            self.since.fill_(self.schedule.step)
        else:
            backend.mark(self.since, rows, self.schedule.step)
            self._sweep(backend)

    def _sweep(self, backend: Backend) -> None:
        """Bring a few more rows up to date, in turn, so that no row waits longer than the schedule remembers.

        At 10M rows that is 611 rows a step, which lie side by side; a table of 100 rows has one row's turn in 164
        steps.
        """
        round_length = self.schedule.capacity - 2
        due = self.schedule.step * self.row_count // round_length
        while self._swept < due:
            first = self._swept % self.row_count
            last = min(first + due - self._swept, self.row_count)
            backend.catch_up(self.param, self._moments, self.since, self.schedule, range(first, last))
            self._swept += last - first

"""One parameter whose rows wait: which step each row has reached, and the schedule it has to make up for."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor

from .._backends import Backend
from .._schedule import Schedule
from .._state import State

# How far, relative to a row's own deferred move, the series may be off before terms are added one by one.
_TOLERANCE = {torch.float64: 1e-15}
_TOLERANCE_BELOW_FLOAT64 = 1e-9


# The options that a row's path depends on besides lr and weight decay: betas, eps, amsgrad.
Options = tuple[tuple[float, float], float, bool]


class StaleRowsError(RuntimeError):
    """A gradient came for rows that had not been brought up to date before they were read. Nothing has changed."""


def is_only_traced(ids: Tensor | None = None) -> bool:
    """Whether tensors are fake just now, for the sake of their shapes: then no row is read, and none can be moved."""
    return isinstance(ids, FakeTensor) or (torch._C._len_torch_dispatch_stack() > 0 and detect_fake_mode() is not None)


class Table:
    """The deferred steps of one parameter."""

    def __init__(self, param: Tensor, state: State, lead: tuple[int, ...], options: Options, step: int) -> None:
        self.param, self.state = param, state
        self.kept_current = 0
        """How many ``up_to_date`` blocks want the whole table current at all times."""
        self._begin(options, step)
        self.restart(lead)

    def restart(self, lead: tuple[int, ...]) -> None:
        """Take note that the table has these rows now, and that all of them are up to date."""
        self.lead, self.row_count = lead, math.prod(lead)
        self.since = torch.full(lead, self.step, dtype=torch.int32, device=self.param.device)
        """Per row, the step at which it was last up to date."""
        self._began_at = self.step

    def _begin(self, options: Options, step: int) -> None:
        self.options = options
        betas, eps, amsgrad = options
        tolerance = _TOLERANCE.get(self.param.dtype, _TOLERANCE_BELOW_FLOAT64)
        self.schedule = Schedule(betas, eps, amsgrad=amsgrad, step=step, tolerance=tolerance)

    @property
    def step(self) -> int:
        """How many steps this parameter has taken."""
        return self.schedule.step

    def catch_up(self, rows: Tensor, backend: Backend) -> None:
        """Bring these rows up to date."""
        backend.catch_up(self.param, self.state, self.since, self.schedule, rows)

    def flush(self, backend: Backend) -> None:
        """Bring every row up to date."""
        if is_only_traced():
            return
        backend.catch_up(self.param, self.state, self.since, self.schedule, range(self.row_count))

    def adopt(self, options: Options, backend: Backend) -> None:
        """Go on under these options: what is outstanding under the old ones is settled first."""
        if options != self.options:
            self.flush(backend)
            self._begin(options, self.step)
            self._began_at = self.step

    def advance(self, rows: Tensor | None, lr: float | Tensor, weight_decay: float, backend: Backend) -> None:
        """Count a step that has moved these rows, or all of them, and let the others wait."""
        self.schedule.advance(lr, weight_decay)
        if rows is None:
            self.since.fill_(self.step)
        else:
            backend.mark(self.since, rows, self.step)
            self._sweep(backend)
        if self.kept_current:
            self.flush(backend)

    def _sweep(self, backend: Backend) -> None:
        """Bring a few more rows up to date, in turn, so that no row waits longer than the schedule remembers.

        At 10M rows that is 611 rows a step, which lie side by side; a table of 100 rows has one row's turn in 164
        steps.
        """
        round_length = self.schedule.capacity - 1
        turn = (self.step - self._began_at - 1) % round_length
        rows = range(turn * self.row_count // round_length, (turn + 1) * self.row_count // round_length)
        if rows:
            backend.catch_up(self.param, self.state, self.since, self.schedule, rows)

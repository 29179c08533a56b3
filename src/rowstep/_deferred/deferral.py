"""One parameter whose rows wait: which step each row has reached, and the schedule it has to make up for."""

from __future__ import annotations

import math
import weakref

import torch
from torch import Tensor

from .._backends import Addresses, Backend, LateRows, Notes, admit_notes, admit_state
from .._rules.adam import Kept
from .._schedule import Schedule
from .._state import DECAYING, State
from .._torch_internals import is_faked, plainly, writes_to
from .._waiting import Keeper, Waiting, keeper_of, release, watch

# How far, relative to a row's own deferred move, the series may be off before terms are added one by one.
_TOLERANCE = {torch.float64: 1e-15}
_TOLERANCE_BELOW_FLOAT64 = 1e-9

# Notes per row are 32-bit numbers.
_LAST_STEP = (1 << 31) - 2


# The options that a row's path depends on besides lr and weight decay: betas, eps, amsgrad, and those that say what is
# kept of it, and how that is rounded.
Options = tuple[tuple[float, float], float, bool, str, torch.dtype | None, bool, int]


class StaleRowsError(RuntimeError):
    """A gradient names rows that were not up to date when they were read. Nothing was changed.

    The deferred optimizers raise it in ``step()``. The rows were read before the last step, or in a way that torch does
    not show: through an alias, in a scripted module, in a functorch transform. Call ``catch_up`` or ``flush`` before
    such a read.

    Examples:
        >>> import torch
        >>> from rowstep import DeferredAdam, StaleRowsError
        >>> table = torch.nn.Embedding(10, 2, sparse=True)
        >>> optimizer = DeferredAdam(table.parameters())
        >>> for row in (1, 2):
        ...     optimizer.zero_grad()
        ...     table(torch.tensor([row])).sum().backward()
        ...     optimizer.step()
        >>> gradient = torch.sparse_coo_tensor([[1]], torch.ones(1, 2), (10, 2), check_invariants=True)
        >>> table.weight.grad = gradient  # but nobody has read row 1
        >>> try:
        ...     optimizer.step()
        ... except StaleRowsError:
        ...     print("row 1 was not up to date")
        row 1 was not up to date
    """


def new_schedule(options: Options, dtype: torch.dtype, taken: int) -> Schedule:
    """A schedule for a parameter that has taken so many steps."""
    betas, eps, amsgrad, *_ = options
    tolerance = _TOLERANCE.get(dtype, _TOLERANCE_BELOW_FLOAT64)
    return Schedule(betas, eps, amsgrad=amsgrad, step=taken, tolerance=tolerance)


class Deferral:
    """The deferred steps of one parameter, under options and over rows that do not change.

    Where options or rows do change, every row is brought up to date first, and then no row waits: the deferral ends,
    and another begins with the next step.
    """

    def __init__(
        self,
        param: Tensor,
        state: State,
        lead: tuple[int, ...],
        options: Options,
        schedule: Schedule,
        keeper: weakref.ref[Keeper],
        kept: Kept,
    ) -> None:
        self.param, self.state, self.options, self.schedule = param, state, options, schedule
        self._keeper = keeper
        self._moments = {key: state[key] for key in DECAYING if key in state}
        """The moments with which rows wait, even if the state is edited later."""
        self.lead, self.row_count, self.dtype = lead, math.prod(lead), param.dtype
        self.notes = torch.zeros(lead, dtype=torch.int32, device=param.device)
        """Per row, the step of the schedule at which it was last up to date."""
        *_, stochastic_rounding, seed = options
        rounds_weights = stochastic_rounding and param.dtype.itemsize == 2
        self._late = LateRows(param, self._moments, self.notes, schedule, kept, rounds_weights, seed)
        self._swept = 0
        self._writes = -1
        """The table's version counter after the last legitimate write; -1 if it is not tracked."""
        self._counts_writes = False

    @property
    def step(self) -> int:
        """How many steps this parameter has taken."""
        return self.schedule.origin + self.schedule.step

    def has_its_state(self, state: State | None) -> bool:
        """Whether this is the state under which rows wait, and nobody has replaced what is in it."""
        if state is None or state is not self.state:
            return False
        for key, moment in self._moments.items():  # noqa: SIM110  `all` takes twice as long
            if state.get(key) is not moment:
                return False
        return True

    def is_under(self, state: State | None, dtype: torch.dtype, options: Options) -> bool:
        """Whether rows may go on waiting under this state, with these options and this dtype of the parameter."""
        return (
            self.has_its_state(state)
            and options == self.options
            and dtype == self.dtype
            and self.schedule.step < _LAST_STEP  # or the notes run out of numbers
        )

    def where(self, state: State) -> Addresses | None:
        """What ``admit_state`` says of the table and this state."""
        place = self._late.last_place() if self.has_its_state(state) else None
        return admit_state(self.param, state) if place is None else place.at

    def notes_for(self, count: int) -> Notes:
        """What a ``count``-th step writes beside the rows that it moves."""
        note = count - self.schedule.origin
        place = self._late.place  # if they have been looked at, that is enough: nobody else has them
        return admit_notes(self.notes, self.lead, note) if place is None else Notes(self.notes, note, place.notes_at)

    def accept_writes(self) -> None:
        """What has been written to the table until now was right."""
        self._writes = writes_to(self.param) if self._counts_writes else -1

    def refuse_writes(self) -> None:
        """Raise if somebody has written to the table behind the back of ``watch``, while rows waited."""
        is_written = self._writes >= 0 and writes_to(self.param) != self._writes
        if is_written and keeper_of(self.param) is self._keeper():
            raise RuntimeError(
                "the table was written to through another tensor that shares its memory (a view, or what detach() "
                "returned) while rows waited for their steps; expected writes through the parameter itself. Call "
                "opt.flush(param) before such a write. Calling it now accepts the weights as they are"
            )

    def watch(self) -> None:
        """From now on rows may wait, once the step that begins now has been counted."""
        if not isinstance(self.param, Waiting):
            watch([self.param, *self._moments.values()], self.param, self._keeper)
            # Tables that are cut from one buffer are counted together: nothing can be told of one of them.
            self._counts_writes = self.param.untyped_storage().nbytes() == self.param.nbytes
        self._writes = -1  # the step itself writes

    def release(self) -> None:
        """No row waits."""
        release([self.param, *self._moments.values()], self._keeper)
        self._late.forget()

    def catch_up(self, rows: Tensor, backend: Backend) -> int | None:
        """Bring these rows up to date, or return the first number that is not in the table."""
        return backend.catch_up(self._late, rows)

    def flush(self, backend: Backend) -> None:
        """Bring every row up to date."""
        if is_faked():
            return
        plainly(backend.catch_up, self._late, range(self.row_count))
        self.release()

    def all_stepped(self) -> None:
        """Note that the next step, which is about to be counted, has moved every row."""
        self.notes.fill_(self.schedule.step + 1)

    def advance(self, count: int, lr: float | Tensor, weight_decay: float, backend: Backend) -> None:
        """Count a step. The rows that it has moved have their notes already, and the others wait.

        ``count`` is how many the parameter has taken then. If this is interrupted, a second call takes it to its end.
        """
        self.schedule.advance(lr, weight_decay, to=count - self.schedule.origin)
        self.accept_writes()
        # Bring a few more rows up to date, in turn, so that no row waits longer than the schedule remembers. At 10M
        # rows that is 698 rows a step, which lie side by side; a table of 100 rows has one row's turn in 143 steps.
        due = self.schedule.step * self.row_count // self.schedule.longest_wait
        while self._swept < due:
            first = self._swept % self.row_count
            last = min(first + due - self._swept, self.row_count)
            backend.catch_up(self._late, range(first, last))
            self._swept += last - first

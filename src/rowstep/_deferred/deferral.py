"""What the rows of a table wait for: the step that each has reached, and the schedule that it has to make up for."""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .._backends import kernels_for, reference
from .._memory import file_of, is_in_file
from .._rule import Rule
from .._rules.rounding import step_key
from .._schedule import Path, Schedule
from .._state import MOMENTS, State, compute_dtype, count_tensor, counting, misfit, steps_taken
from .._table import Table
from .._torch_internals import is_faked, note_writes, without_modes, without_torch_function, writes_to
from .._waiting import Waiting, keeper_of, release, watch

# How far, relative to a row's own deferred move, the series may be off before terms are added one by one.
_TOLERANCE = {torch.float64: 1e-15}
_TOLERANCE_BELOW_FLOAT64 = 1e-9

_CALL = operator.methodcaller("__call__")

# Notes per row are 32-bit numbers.
_LAST_STEP = (1 << 31) - 2


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


class Deferral:
    """The steps that the rows of a table wait for, under options and over rows that do not change.

    Where options or rows do change, every row is brought up to date first, and then no row waits: the deferral ends,
    and another begins with the next step.
    """

    def __init__(self, table: Table, rule: Rule, schedule: Schedule, keeper: weakref.ref[Any]) -> None:
        self.options, self.schedule, self._keeper = rule.waiting_options, schedule, keeper
        self.notes = torch.zeros(table.lead, dtype=torch.int32, device=table.param.device)
        """Per row, the step of the schedule at which it was last up to date."""
        self.is_of_parent = False
        """Whether this is a forked process, which shares the memory of the table but not the notes."""
        self._seed, self.rounds_weights = rule.seed, rule.rounds_weights_of(table.param.dtype)
        self.rounds = self.rounds_weights or table.spec.rounds_moments_of(*table.dtypes[1:])
        self._swept = self._due(table)
        self._writes = -1
        """The table's version counter after the last legitimate write; -1 if it is not tracked."""
        self._counts_writes = False
        self._count: Any = None
        self._count_writes = -1
        """The Tensor in which this table's steps were last counted, and its version counter then."""
        self._attach_to(table)

    def _attach_to(self, table: Table) -> None:
        if (file := without_torch_function(file_of, table.param)) is not None:
            file.note_deferral(self)
        self.table, self.columns = table, table.columns
        self._waiting: list[Any] = [table.param, *(table.slots[name] for name in MOMENTS if name in table.slots)]
        self.kernel: Any = None
        """The kernel that brings rows up to date, once one has been needed."""
        table.tell_kernels(self.notes)
        table.pending = self
        if any(tensor.is_cpu and (tensor.is_shared() or is_in_file(tensor)) for tensor in self._waiting):
            _in_shared_memory.add(self)

    @property
    def step(self) -> int:
        """How many steps this parameter has taken."""
        return self.schedule.path.origin + self.schedule.step

    @property
    def key(self) -> int:
        """The key of random rounding when rows catch up with the schedule."""
        return step_key(self._seed, self.step)

    def goes_on(self, rule: Rule) -> bool:
        """Whether rows may go on waiting under this rule, and nobody else has counted the table's steps."""
        if not (self.options is rule.waiting_options or self.options == rule.waiting_options):
            return False
        state, count = self.table.state, self._count
        is_ours = state["step"] is count and self._count_writes == writes_to(count)
        if not is_ours and steps_taken(state) != self.step:
            return False
        return self.schedule.step < _LAST_STEP  # or notes run out of numbers

    def stale(self, rows: Tensor) -> int:
        """How many of these row numbers name a row that is not up to date."""
        return int((self.notes.view(-1)[rows] < self.schedule.step).sum())

    @property
    def has_waiting_rows(self) -> bool:
        return isinstance(self.table.param, Waiting)

    @property
    def awaits_step(self) -> bool:
        """Whether writes to the table are not tracked, because a step is making them."""
        return self._writes < 0

    def accept_writes(self) -> None:
        """What has been written to the table until now was right."""
        self._writes = writes_to(self.table.param) if self._counts_writes else -1

    def refuse_writes(self) -> None:
        """Raise if somebody has written to the table behind the back of ``watch``, while rows waited."""
        if self._writes < 0 or writes_to(self.table.param) == self._writes:
            return
        keeper = self._keeper()
        if keeper_of(self.table.param) is keeper and not _is_counted_with(self.table.param, keeper._all_params()):
            raise RuntimeError(
                "the table was written to through another tensor that shares its memory (a view, or what detach() "
                "returned) while rows waited for their steps; expected writes through the parameter itself. Call "
                "opt.flush(param) before such a write. Calling it now accepts the weights as they are"
            )

    def watch(self) -> None:
        """From now on rows may wait, once the step that begins now has been counted."""
        param = self.table.param
        if not isinstance(param, Waiting):
            watch(self._waiting, param, self._keeper)
            # Tables that are cut from one buffer are counted together: nothing can be told of one of them. Nor of one
            # that was made in inference mode.
            self._counts_writes = param.untyped_storage().nbytes() == param.nbytes and not param.is_inference()
        self._writes = -1  # the step itself writes

    def release(self) -> None:
        """No row waits."""
        release(self._waiting, self._keeper)

    def catch_up(self, rows: Tensor | range, *, in_finalizer: bool = False) -> bool:
        """Bring these rows up to date; False if one of them is not in the table."""
        if not self.table.is_in_place(self.table.slots):
            self._look_again()
        kernels = self.table.kernels or reference
        return bool((kernels.catch_up_in_finalizer if in_finalizer else kernels.catch_up)(self, rows))

    def _look_again(self) -> None:
        """Raise unless what waits still belongs together, wherever it lies now."""
        table = self.table
        if self.is_of_parent:
            raise RuntimeError(
                "rows of the table wait in the process that this one was forked from, and both share its memory, but "
                "not what is known of the rows; expected none to wait. Call opt.flush() before the fork"
            )
        if table.param.shape[:1] != table.lead:
            raise ValueError(
                f"the parameter now has shape {tuple(table.param.shape)}; expected leading dimensions {table.lead}, as "
                "in its state. To change the rows of a table, use the optimizer's grow, keep_rows or permute_rows"
            )
        state = {"step": self.step, **table.slots}  # with which rows wait, even if the optimizer's has been edited
        if reason := misfit(state, table.param):
            raise ValueError(reason)
        moved = Table(table.param, state, table.spec, kernels_for(table.param))
        moved.state, moved.report = table.state, table.report  # where steps are counted, and what was found
        self._attach_to(moved)

    def flush(self, *, in_finalizer: bool = False) -> None:
        """Bring every row up to date."""
        if not is_faked():
            without_torch_function(self.catch_up, range(self.table.row_count), in_finalizer=in_finalizer)
            self.release()

    def count(self, schedule: Schedule) -> None:
        """Go on with the schedule of the next step. Until rows move, it is a step in which none had a gradient."""
        write, *arguments = counting(self.table.state, self.step + 1)
        self.watch()
        # To Python this is one call, and signals are handled between those.
        list(map(_CALL, (functools.partial(write, *arguments), functools.partial(setattr, self, "schedule", schedule))))
        count = self.table.state["step"]
        if not count.is_inference():  # those do not tell who has written to them
            self._count, self._count_writes = count, writes_to(count)
        self.watch()  # a signal's handler may have flushed in the meantime

    def _due(self, table: Table) -> int:
        """How many rows were due to be swept, in turn, since the table's first step: so that a run which is resumed
        sweeps the same rows as one that went on.
        """
        return self.step * table.row_count // self.schedule.path.longest_wait

    def sweep(self) -> None:
        """Bring a few more rows up to date, in turn, so that no row waits longer than the schedule remembers.

        At 10M rows that is 698 rows a step, which lie side by side; in a table of 100 rows, one in 143 steps.
        """
        rows, due = self.table.row_count, self._due(self.table)
        while self._swept < due:
            first = self._swept % rows
            last = min(first + due - self._swept, rows)
            self.catch_up(range(first, last))
            self._swept += last - first


_in_shared_memory: weakref.WeakSet[Deferral] = weakref.WeakSet()
"""Whose tables a forked process shares."""


def _leave_to_parent() -> None:
    for pending in list(_in_shared_memory):
        pending.is_of_parent = True
        pending.table.misplace()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_leave_to_parent)


def begin(table: Table, rule: Rule, taken: int, others: Iterable[Deferral], keeper: weakref.ref[Any]) -> None:
    """Let the rows of a table wait from now on; every row is up to date, after the steps taken so far."""
    if not isinstance(table.state["step"], Tensor):
        table.state["step"] = count_tensor(table.state["step"])
    dtype = table.param.dtype
    for other in others:  # one that begins at the same step takes the same
        if (
            other.step == taken
            and not other.schedule.step
            and other.options == rule.waiting_options
            and other.table.dtypes[0] == dtype
        ):
            schedule = other.schedule
            break
    else:
        tolerance = _TOLERANCE.get(dtype, _TOLERANCE_BELOW_FLOAT64)
        schedule = Path(rule.betas, rule.eps, amsgrad=rule.amsgrad, step=taken, tolerance=tolerance).begin()
    Deferral(table, rule, schedule, keeper)


def _is_counted_with(param: Tensor, others: Iterable[Tensor]) -> bool:
    """Whether torch counts writes to another of these together with those to ``param``, so that they tell nothing.

    It does for parameters cut from one buffer, even if ``model.double()`` has given each its own memory since.
    """
    others = [other for other in others if other is not param and not other.is_inference()]
    before = list(map(writes_to, others))
    note_writes([param])
    return before != list(map(writes_to, others))


@torch.inference_mode()  # in which all tensors can be written, also those of a state that was made in it
def flush_orphans(deferrals: Iterable[Deferral]) -> None:
    """Bring up to date what a dropped optimizer leaves behind.

    Garbage collection calls this, in the middle of anything: of a compilation, of a trace, between two lines of a
    launch, in any thread. So it waits for no lock and compiles nothing. It takes a kernel that has run before, on this
    thread alone, and where there is none the reference, in plain torch operations: 1M x 64 took 1.1 s by those.
    """
    with without_modes():
        for deferral in deferrals:
            # The table was replaced by another: nothing waits in that one. Or its rows are those of another process.
            with contextlib.suppress(ValueError, RuntimeError):
                deferral.flush(in_finalizer=True)
            deferral.release()


def raise_maximum(state: State, beta2: float) -> None:
    """Raise amsgrad's maximum to what the next step without a gradient would make it.

    It must not change while rows wait, and it would if amsgrad had been off while the moments grew, or if somebody had
    written to them.
    """
    largest, second = state["max_exp_avg_sq"], state["exp_avg_sq"]
    wide = compute_dtype(largest.dtype, second.dtype)  # a state of 16 bits may have a maximum of 32
    largest.copy_(torch.maximum(largest.to(wide), second.to(wide) * beta2))

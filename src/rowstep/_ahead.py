"""Rows that are read before their batch begins, or stepped after it has ended, while the model computes elsewhere.

The updates of rows do not depend on each other. If a table takes a step and the ids of the next batch are known, only
the rows that both name have to move before the next batch is read. So a thread, the worker, does for every table, in
the order in which it is told:

    an announced batch  find its distinct rows, and read them, unless rows of the table wait for steps
    a step, first part  step the rows that an announced batch names, and read these again
    a step, the rest    step the other rows, when no table has anything more urgent to do

The result has the same bits as without: each row takes the same updates, of the same sums, in the same order. While
there is something to do, the table is watched as one whose rows wait (``_waiting``), and the optimizer's lock is taken
only when the worker has finished. So whoever reads or writes the table by another way finds it as it should be.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import operator
import os
import queue
import threading
import weakref
from _thread import start_new_thread
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from dataclasses import dataclass, field
from multiprocessing import util
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ._gradient import RowGradient
from ._memory import before_sync, is_in_file, read_from_file
from ._table import Job
from ._torch_internals import note_writes, without_torch_function, writes_to
from ._waiting import Waiting, keeper_of, watch

# An announced batch is forgotten when it was not used after so many steps, or so many others were announced.
_STEPS_KEPT = 2
_MOST_ANNOUNCED = 16

_CALL = operator.methodcaller("__call__")


@dataclass(eq=False, slots=True)
class _Order:
    """Something to do for the worker."""

    do: Callable[[], None]
    is_step: bool = False
    undone: Any = field(default_factory=threading.Lock)
    """Held until it is done. An Event is Python code: an interrupt there may leave it locked, for the worker too."""

    def __post_init__(self) -> None:
        self.undone.acquire()

    def wait(self) -> None:
        list(map(_CALL, (self.undone.acquire, self.undone.release)))  # one call, for others may be waiting as well


@dataclass(eq=False, slots=True)
class Announced:
    """A batch to come."""

    ids: Tensor
    writes: int  # to the table when its rows were read; -1 if they are not to be read early
    order: Any = None  # the last one that concerns this batch
    age: int = 0
    distinct: Any = None  # ids, ascending; None until the worker has found them
    places: Any = None  # of each id among them
    rows: Tensor | None = None


class _Split:
    """Which rows of a gradient batches to come name, and where in these."""

    def __init__(self, rows: Tensor, batches: tuple[Announced, ...], kernels: Any) -> None:
        self.rows, self.batches = rows, batches
        # For each batch the places, among its distinct rows, of those that the gradient has.
        self.named: list[tuple[Announced, Tensor]] = []
        is_urgent = torch.zeros(len(rows), dtype=torch.bool)
        for batch in batches:
            if batch.distinct is not None:
                places = kernels.places_among(rows, batch.distinct)
                is_urgent |= places >= 0
                self.named.append((batch, places[places >= 0]))
        self.urgent, self.rest = is_urgent.nonzero().view(-1), (~is_urgent).nonzero().view(-1)


class Ahead:
    """What the worker has to do for one table. Its methods are for the owner's thread, but for those with ``_do``."""

    def __init__(self, weight: Tensor) -> None:
        self.keep([weight])
        self.announced: list[Announced] = []
        self._orders: collections.deque[_Order] = collections.deque()  # what is not there any more, has been done
        self._rest: _Order | None = None  # of the last step, until it has been done
        self._error: BaseException | None = None
        self._reads_early_under: Callable[[], Any] = _nobody
        self._kernels: Any = None  # those of the last step
        self._taken: Tensor | None = None  # since then: the distinct rows that the next gradient may have, too
        self._split: _Split | None = None

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Know what has the rows and their state."""
        self._in_files = [weakref.ref(tensor) for tensor in tensors if is_in_file(tensor) and tensor.is_contiguous()]

    def read_late(self) -> None:
        """Read no rows before they are looked up."""
        self._reads_early_under = _nobody
        for batch in self.announced:
            batch.writes = -1

    def read_files(self, rows: Tensor) -> None:
        """Have these rows and their state in memory, as far as they are in files."""
        for reference in self._in_files:
            if (tensor := reference()) is not None:
                read_from_file(tensor, rows)

    # Announcing

    def _reads_early(self, weight: Tensor) -> bool:
        """Whether the optimizer of the last step watches the table, and no row waits: nobody writes to it unseen."""
        keeper = keeper_of(weight) if isinstance(weight, Waiting) else None
        return keeper is not None and keeper is self._reads_early_under()

    def announce(self, weight: Tensor, ids: Tensor, *, pinned: bool, may_read: bool) -> None:
        """Let the worker prepare a lookup of these ids, which nobody else writes to."""
        batch = Announced(ids, writes_to(weight) if may_read and self._reads_early(weight) else -1)
        batch.order = _Order(lambda: self._do_announced(batch, weight, pinned))
        self.announced = [*self.announced[1 - _MOST_ANNOUNCED :], batch]
        self._give(batch.order)
        self._compare()

    def _compare(self) -> None:
        """Let the worker find out which rows of the next step will be urgent, while the model computes."""
        taken, batches = self._taken, tuple(self.announced)
        if taken is not None and batches and self._kernels is not None:
            self._give(_Order(lambda: setattr(self, "_split", _Split(taken, batches, self._kernels))))

    def take(self, ids: Tensor) -> Announced | None:
        """The announced batch of these ids, which is not announced any more; None if there is none."""
        for batch in self.announced:
            if batch.ids.dtype is ids.dtype and torch.equal(batch.ids, ids):
                break
        else:
            return None
        self.announced = [other for other in self.announced if other is not batch]
        if batch.order in self._orders.copy():  # an interrupt may have come before it was given
            _tell_worker(self)  # or before the worker was told
            batch.order.wait()
        if self._error is not None:
            self.finish()
        if batch.distinct is None:
            return None  # they could not be found, and the lookup will say why
        self._taken = batch.distinct
        self._compare()
        return batch

    def rows_of(self, batch: Announced, weight: Tensor) -> Tensor:
        """The distinct rows of a batch that was taken. The worker may be stepping others."""
        if batch.rows is not None and batch.writes == writes_to(weight) and self._reads_early(weight):
            return batch.rows
        if isinstance(weight, Waiting) and (keeper := keeper_of(weight)) is not None:
            keeper._catch_up_announced(weight, batch.distinct)
        return weight.index_select(0, batch.distinct)

    def _do_announced(self, batch: Announced, weight: Tensor, pinned: bool) -> None:
        distinct, batch.places = torch.unique(batch.ids.long(), return_inverse=True)
        if len(distinct) and 0 <= int(distinct[0]) <= int(distinct[-1]) < len(weight):
            self.read_files(distinct)
            if batch.writes >= 0:
                rows = torch.empty(len(distinct), *weight.shape[1:], dtype=weight.dtype, pin_memory=pinned)
                batch.rows = torch.index_select(weight, 0, distinct, out=rows)
        batch.distinct = distinct

    # Stepping

    def step(self, job: Job, step_rows: Callable[[Job, RowGradient], int]) -> None:
        """Let the worker make a step that has been counted: what announced batches name first."""
        table, keeper = job.table, job.table.keeper()
        param, self._kernels = table.param, table.kernels
        before = writes_to(param) if self._reads_early(param) else -2
        is_seen = table.pending is None and not param.is_inference()
        self._reads_early_under = table.keeper if is_seen else _nobody
        note_writes([param])
        order = _Order(lambda: self._do_step(job, step_rows, batches, keeper), is_step=True)
        for batch in self.announced:
            batch.order, batch.age = order, batch.age + 1
            batch.writes = batch.writes + 1 if batch.writes == before else -1
        self.announced = [batch for batch in self.announced if batch.age <= _STEPS_KEPT]
        batches, self._taken = tuple(self.announced), None
        if table.pending is None:  # those whose rows wait are watched already
            watch([param, *table.slots.values()], param, table.keeper)
        self._give(order)

    def _do_step(self, job: Job, step_rows: Callable[..., int], batches: tuple[Announced, ...], keeper: Any) -> None:
        gradient, weight = job.gradient, job.table.param
        split, self._split = self._split, None
        if split is None or split.batches != batches or not torch.equal(split.rows, gradient.rows):
            split = _Split(gradient.rows, batches, job.table.kernels)
        skipped = step_rows(job, _part_of(gradient, split.urgent))
        for batch, places in split.named:
            if batch.rows is not None and batch.writes >= 0:
                batch.rows.index_copy_(0, places, weight.index_select(0, batch.distinct[places]))

        def rest() -> None:
            more = step_rows(job, _part_of(gradient, split.rest))
            keeper._lock.finished.append((job, skipped + more))

        self._rest = _Order(rest, is_step=True)

    # Orders

    def _give(self, order: _Order) -> None:
        self._orders.append(order)  # to Python this is one call: an interrupt comes before all of a step, or after
        _tell_worker(self)

    @property
    def is_idle(self) -> bool:
        """Whether the worker has nothing to do for this table, and never will without being told."""
        return not (self._orders or self._rest)

    def finish(self) -> None:
        """Wait until the worker has done everything. Raise if it could not."""
        self.wait()
        if self._error is not None:
            error, self._error = self._error, None
            self.read_late()  # what was read early may lack rows that have moved
            raise RuntimeError(
                "a step of a table whose next rows were announced could not be completed; some of its rows have not "
                f"moved: {error!r}"
            ) from error

    def wait(self) -> None:
        while not self.is_idle and threading.get_ident() not in _worker:  # which may collect garbage
            last = _Order(lambda: None)
            self._give(last)
            last.wait()

    def leave_behind(self) -> None:
        """In a forked process: forget what another thread has told the worker since that was waited for."""
        orders = [*self._orders, *([] if self._rest is None else [self._rest])]
        self._orders.clear()
        self._rest = None
        if any(order.is_step for order in orders):
            self._error = self._error or RuntimeError("another thread took it while this process was forked")

    def _do_next(self) -> None:
        """Carry out the orders, each after the rest of the step before it; and that rest if there are none."""
        if not self._orders:
            self._do_rest()
        while self._orders:
            self._do_rest()
            order = self._orders[0]
            self._do(order)
            self._orders.popleft()
            order.undone.release()
        if self._rest is not None:
            _told.put(self)  # after what other tables have to do

    def _do_rest(self) -> None:
        if self._rest is not None:
            self._do(self._rest)
            self._rest = None

    def _do(self, order: _Order) -> None:
        try:
            order.do()
        except BaseException as error:  # whatever it is, it is the owner's
            if order.is_step:  # a lookup that was not prepared says itself what is wrong
                self._error = self._error or error
        # If nobody else has the optimizer, it ends here, and may step all rows. Whoever reads them still waits for us.
        del order.do


def _nobody() -> None:
    """In place of a reference to an optimizer."""


def _part_of(gradient: RowGradient, places: Tensor) -> RowGradient:
    return RowGradient(gradient.rows.index_select(0, places), gradient.values.index_select(0, places), gradient.lead)


# By the weights of ``HostEmbedding``. Weakly: a table that is gone needs no worker.
_of_tables: MutableMapping[Tensor, Ahead] = WeakTensorKeyDictionary()


def of(param: Tensor) -> Ahead | None:
    """What the worker does for this parameter, if that is the table of a ``HostEmbedding``."""
    return _of_tables.get(param)


def of_table(weight: Tensor) -> Ahead:
    """The same, made if there is none."""
    return of(weight) or _of_tables.setdefault(weight, Ahead(weight))


def wait_for_all() -> list[Ahead]:
    # In one call, while other threads may make more of them.
    tables = list(_of_tables.data.values())  # type: ignore[attr-defined]
    for ahead in tables:
        ahead.wait()
    return tables


def finish_all() -> None:
    """Wait for all tables, and then raise if something could not be done for one of them."""
    for ahead in wait_for_all():
        ahead.finish()


def _taken_from(finished: collections.deque[tuple[Job, int]]) -> Iterator[tuple[Job, int]]:
    """One after the other; a signal's handler may take some of them in between."""
    with contextlib.suppress(IndexError):
        while True:
            yield finished.popleft()


class WaitingLock:
    """An optimizer's lock, for one whose tables may be at work: to have it, one waits until they are not."""

    def __init__(self, lock: Any, optimizer: weakref.ref[Any]) -> None:
        self._lock, self._optimizer = lock, optimizer
        self.finished: collections.deque[tuple[Job, int]] = collections.deque()
        """Steps that were completed, and how many rows they skipped. A table that had them would keep itself alive."""

    def __enter__(self) -> None:
        acquired: list[bool] = []
        try:
            acquired.extend(map(self._lock.acquire, [True]))  # one call, as above: an interrupt comes before or after
            optimizer: Any = self._optimizer()
            for table in list(optimizer._tables.values()):
                if table.ahead is not None:
                    table.ahead.finish()
            for job, skipped in _taken_from(self.finished):
                without_torch_function(optimizer._after_launches, [job], skipped)
        except BaseException:
            for _ in acquired:
                self._lock.release()
            raise

    __exit__ = property(operator.attrgetter("_lock.__exit__"))  # in C, so that no interrupt comes before it


# The worker


def _work() -> None:
    torch.set_grad_enabled(False)  # for this thread
    while True:
        ahead = _told.get()
        without_torch_function(ahead._do_next)
        del ahead  # a table lives on only while there is something to do


_told: queue.SimpleQueue[Ahead] = queue.SimpleQueue()
_to_start: Iterator[Callable[[], None]] = iter([_work])  # nothing, once it was started
_worker: list[int] = []
"""The thread that was started, if there is one: it never ends."""


def _tell_worker(ahead: Ahead) -> None:
    global _to_start
    _told.put(ahead)
    if not _worker:
        try:
            # One call, as above, also where another thread or a signal handler comes in between. Not a Thread: an
            # interrupt leaves its ``start`` half done, and lets ``is_alive`` mark one that runs as stopped.
            _worker.extend(map(start_new_thread, _to_start, [()]))
        except BaseException:
            _to_start = iter([_work])  # there was no room for a thread
            raise


def _begin_again() -> None:
    global _told, _to_start, _worker
    _told, _to_start, _worker = queue.SimpleQueue(), iter([_work]), []
    for ahead in list(_of_tables.values()):
        ahead.leave_behind()


before_sync.append(lambda seconds: finish_all())
atexit.register(finish_all)
# Children of multiprocessing end without atexit's functions, and begin by forgetting what there is to do at their end.
util.register_after_fork(finish_all, lambda _: util.Finalize(None, finish_all, exitpriority=0))
if hasattr(os, "register_at_fork"):  # not on Windows
    # What could not be done, the owner is told later, in both processes.
    os.register_at_fork(before=wait_for_all, after_in_child=_begin_again)

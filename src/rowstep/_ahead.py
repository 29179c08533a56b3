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
import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from . import _before_sync
from ._gradient import RowGradient
from ._memory import is_in_file, read_from_file
from ._table import Job
from ._torch_internals import note_writes, plainly, writes_to
from ._waiting import Waiting, keeper_of, watch

# An announced batch is forgotten when it was not used after so many steps, or so many others were announced.
_STEPS_KEPT = 2
_MOST_ANNOUNCED = 16


class Announced:
    """A batch to come."""

    __slots__ = ("age", "distinct", "ids", "places", "rows", "writes")

    def __init__(self, ids: Tensor, writes: int) -> None:
        self.ids, self.age = ids, 0
        self.writes = writes
        """How often the table has been written to when its rows were read; -1 if they are not to be read early."""
        self.distinct: Any = None
        self.places: Any = None
        """The distinct ids, ascending; and for each id its place among them. None until the worker has found them."""
        self.rows: Tensor | None = None


class _Split:
    """Which rows of a gradient batches to come name, and where in these."""

    def __init__(self, rows: Tensor, batches: tuple[Announced, ...], kernels: Any) -> None:
        self.rows, self.batches = rows, batches
        is_urgent = torch.zeros(len(rows), dtype=torch.bool)
        self.named: list[tuple[Announced, Tensor]] = []
        """For each batch the places, among its distinct rows, of those that the gradient has."""
        for batch in batches:
            if batch.distinct is not None:
                places = kernels.places_among(rows, batch.distinct)
                is_named = places >= 0
                is_urgent |= is_named
                self.named.append((batch, places[is_named]))
        self.urgent, self.rest = is_urgent.nonzero().view(-1), (~is_urgent).nonzero().view(-1)

    def is_of(self, rows: Tensor, batches: tuple[Announced, ...]) -> bool:
        return self.batches == batches and torch.equal(self.rows, rows)


class _Order:
    """Something to do for the worker, which concerns these batches."""

    __slots__ = ("batches", "do", "done", "is_step")

    def __init__(self, do: Callable[[], None], batches: tuple[Announced, ...], *, is_step: bool = False) -> None:
        self.do, self.batches, self.is_step, self.done = do, batches, is_step, threading.Event()


class Ahead:
    """What the worker has to do for one table. Its methods are for the owner's thread, but for those with ``_do``."""

    def __init__(self, weight: Tensor) -> None:
        self.keep([weight])
        self.announced: list[Announced] = []
        self._orders: collections.deque[_Order] = collections.deque()
        """In the order in which they are carried out. One that is not in it any more, has been."""
        self._rest: _Order | None = None
        """What is left of the last step, until it has been done."""
        self._error: BaseException | None = None
        self._taken: Tensor | None = None
        """The distinct rows that were last taken, since the last step: its gradient may have the same."""
        self._split: _Split | None = None
        self._reads_early = False
        self._kernels: Any = None
        """Those of the last step."""

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Know what has the rows and their state."""
        self._in_files = [weakref.ref(tensor) for tensor in tensors if is_in_file(tensor)]

    def read_late(self) -> None:
        """Read no rows before they are looked up."""
        self._reads_early = False
        for batch in self.announced:
            batch.writes = -1

    def read_files(self, rows: Tensor) -> None:
        """Have these rows and their state in memory, as far as they are in files."""
        for reference in self._in_files:
            if (tensor := reference()) is not None:
                read_from_file(tensor, rows)

    # Announcing

    def announce(self, weight: Tensor, ids: Tensor, *, pinned: bool, may_read: bool) -> None:
        """Let the worker prepare a lookup of these ids, which nobody else writes to."""
        # Rows are read early only while nobody can write to the table unseen.
        is_watched = may_read and self._reads_early and isinstance(weight, Waiting)
        batch = Announced(ids, writes_to(weight) if is_watched else -1)
        self.announced = [*self.announced[1 - _MOST_ANNOUNCED :], batch]
        self._orders.append(_Order(lambda: self._do_announced(batch, weight, pinned), (batch,)))
        self._compare()
        _tell_worker(self)

    def _compare(self) -> None:
        """Let the worker find out which rows of the next step will be urgent, while the model computes."""
        taken, batches = self._taken, tuple(self.announced)
        if taken is not None and batches and self._kernels is not None:
            self._orders.append(_Order(lambda: setattr(self, "_split", _Split(taken, batches, self._kernels)), ()))
            _tell_worker(self)

    def take(self, ids: Tensor) -> Announced | None:
        """The announced batch of these ids, which is not announced any more; None if there is none."""
        for batch in self.announced:
            if batch.ids.dtype is ids.dtype and torch.equal(batch.ids, ids):
                self.announced = [other for other in self.announced if other is not batch]
                for order in reversed(self._orders.copy()):
                    if batch in order.batches:
                        _tell_worker(self)  # again: an interrupt may have come between order and word
                        order.done.wait()
                        break
                if self._error is not None:
                    self.finish()
                if batch.distinct is None:
                    return None  # they could not be found, and the lookup will say why
                self._taken = batch.distinct
                self._compare()
                return batch
        return None

    @staticmethod
    def rows_of(batch: Announced, weight: Tensor) -> Tensor:
        """The distinct rows of a batch that was taken. The worker may be stepping others."""
        is_watched = isinstance(weight, Waiting)
        if is_watched and batch.rows is not None and writes_to(weight) == batch.writes:
            return batch.rows
        keeper = keeper_of(weight) if is_watched else None
        if keeper is not None:
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
        self._reads_early = table.pending is None and not param.is_inference()
        before = writes_to(param) if self._reads_early and isinstance(param, Waiting) else -2
        note_writes([param])
        for batch in self.announced:
            batch.age += 1
            batch.writes = batch.writes + 1 if batch.writes == before else -1
        self.announced = [batch for batch in self.announced if batch.age <= _STEPS_KEPT]
        batches, self._taken = tuple(self.announced), None
        if table.pending is None:  # those whose rows wait are watched already
            watch([param, *table.slots.values()], param, table.keeper)
        # To Python this is one call: whatever interrupts it, either nothing of the step is made or all.
        self._orders.append(_Order(lambda: self._do_step(job, step_rows, batches, keeper), batches, is_step=True))
        _tell_worker(self)

    def _do_step(self, job: Job, step_rows: Callable[..., int], batches: tuple[Announced, ...], keeper: Any) -> None:
        gradient, weight = job.gradient, job.table.param
        split, self._split = self._split, None
        if split is None or not split.is_of(gradient.rows, batches):
            split = _Split(gradient.rows, batches, job.table.kernels)
        skipped = step_rows(job, _part_of(gradient, split.urgent))
        for batch, places in split.named:
            if batch.rows is not None and batch.writes >= 0:
                batch.rows.index_copy_(0, places, weight.index_select(0, batch.distinct[places]))

        def rest() -> None:
            more = step_rows(job, _part_of(gradient, split.rest))
            keeper._lock.finished.append((job, skipped + more))

        self._rest = _Order(rest, (), is_step=True)

    # Waiting

    @property
    def is_idle(self) -> bool:
        """Whether the worker has nothing to do for this table, and never will without being told."""
        return not (self._orders or self._rest)

    def finish(self) -> None:
        """Wait until the worker has done everything. Raise if it could not."""
        self.wait()
        if self._error is not None:
            error, self._error = self._error, None
            raise RuntimeError(
                "a step of a table whose next rows were announced could not be completed; some of its rows have not "
                f"moved: {error!r}"
            ) from error

    def wait(self) -> None:
        """Wait until the worker has done everything."""
        while not self.is_idle and threading.current_thread() is not _worker:  # which may collect garbage
            done = threading.Event()
            _tell_worker(self, done)
            done.wait()

    def _do_next(self, done: threading.Event | None) -> None:
        """Do what there is to do, but the rest of a step only if nothing else is, or somebody waits for it."""
        had_orders = bool(self._orders)
        while self._orders:
            self._do_rest()
            order = self._orders[0]
            self._do(order)
            self._orders.popleft()
            order.done.set()
        if done is not None or not had_orders:
            self._do_rest()
        if done is not None:
            done.set()
        elif self._rest is not None:
            _told.put((self, None))  # after what other tables have to do

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
        # If nobody else has the optimizer, it ends here, and may step all rows: whoever reads them still waits for this.
        del order.do


def _part_of(gradient: RowGradient, places: Tensor) -> RowGradient:
    return RowGradient(gradient.rows.index_select(0, places), gradient.values.index_select(0, places), gradient.lead)


# The tables that have one. Weakly: a table that is gone needs no worker.
_of_tables: Any = WeakTensorKeyDictionary()


def of(param: Tensor) -> Ahead | None:
    """What the worker does for this parameter, if that is the table of a ``HostEmbedding``."""
    found: Ahead | None = _of_tables.get(param)
    return found


def of_table(weight: Tensor) -> Ahead:
    """The same, made if there is none."""
    found = of(weight)
    if found is None:
        found = _of_tables[weight] = Ahead(weight)
    return found


def finish_all() -> None:
    """Wait until the worker has nothing to do. Raise if it could not do something, but wait for all tables first."""
    tables = list(_of_tables.values())
    for ahead in tables:
        ahead.wait()
    for ahead in tables:
        ahead.finish()


class WaitingLock:
    """An optimizer's lock, for one whose tables may be at work: to have it, one waits until they are not."""

    def __init__(self, lock: Any, optimizer: weakref.ref[Any]) -> None:
        self._lock, self._optimizer = lock, optimizer
        self.finished: collections.deque[tuple[Job, int]] = collections.deque()
        """Steps that the worker has completed, and how many rows it has skipped. Not kept with the table, which would
        then keep itself alive."""

    def __enter__(self) -> None:
        self._lock.acquire()
        try:
            optimizer: Any = self._optimizer()
            for table in list(optimizer._tables.values()):
                if table.ahead is not None:
                    table.ahead.finish()
            while self.finished:
                job, skipped = self.finished.popleft()
                plainly(optimizer._after_launches, [job], skipped)
        except BaseException:
            self._lock.release()
            raise

    def __exit__(self, *_: object) -> None:
        self._lock.release()


# The worker

_told: queue.SimpleQueue[tuple[Ahead, threading.Event | None]] = queue.SimpleQueue()
_worker: threading.Thread | None = None
_starting = threading.RLock()  # a signal handler may come by here as well


def _tell_worker(ahead: Ahead, done: threading.Event | None = None) -> None:
    """Let the worker look after a table; and set ``done`` when there is nothing left to do."""
    global _worker
    with _starting:
        if _worker is None or not _worker.is_alive():
            _worker = threading.Thread(target=_work, name="rowstep", daemon=True)
            _worker.start()
    _told.put((ahead, done))


def _work() -> None:
    torch.set_grad_enabled(False)  # for this thread
    while True:
        ahead, done = _told.get()
        plainly(ahead._do_next, done)
        del ahead, done  # a table lives on only while there is something to do


def _before_fork() -> None:
    for ahead in list(_of_tables.values()):
        ahead.wait()  # what could not be done, the owner is told later, in both processes


def _begin_again() -> None:
    global _starting, _told, _worker
    _told, _starting, _worker = queue.SimpleQueue(), threading.RLock(), None


_before_sync.functions.add(finish_all)
atexit.register(finish_all)
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(before=_before_fork, after_in_child=_begin_again)

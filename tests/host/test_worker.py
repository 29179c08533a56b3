"""There is one worker, whatever interrupts, and whoever waits for it gets its answer."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from rowstep import DeferredAdam, HostEmbedding, SparseAdam, _ahead
from tests.helpers.interrupts import Interrupter, lines_of

PLACES = ("/rowstep/_ahead.py", "/threading.py", "/queue.py")  # Python's own lines are interrupted as well
BATCHES = [torch.arange(first, first + 12) for first in (0, 6, 3, 20)]


@pytest.fixture(autouse=True)
def none_yet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ROWSTEP_BACKEND", "numba")
    _ahead.finish_all()
    yield
    _ahead.finish_all()


def workers() -> int:
    """How many threads are at work, or wait for it."""

    def is_at_work(frame: Any) -> bool:
        while frame is not None and frame.f_code is not _ahead._work.__code__:
            frame = frame.f_back
        return frame is not None

    return sum(map(is_at_work, sys._current_frames().values()))


class _End:
    def _do_next(self) -> None:
        raise SystemExit


def end_worker() -> None:
    """Begin again as a forked process would."""
    _ahead.finish_all()
    if _ahead._worker:
        _ahead._told.put(_End())  # type: ignore[arg-type]
    while workers():
        time.sleep(0.001)
    _ahead._begin_again()


class Loop:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.table = HostEmbedding(40, 3, device="cpu")
        self.optimizer = SparseAdam(self.table.parameters(), lr=0.1)
        self.back(BATCHES[0])
        self.optimizer.step()
        self.back(BATCHES[0])

    def back(self, ids: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.table(ids).square().sum().backward()

    def announce_and_step(self) -> None:
        self.table.prefetch(BATCHES[1])
        self.optimizer.step()

    def look_up(self) -> None:
        self.announce_and_step()
        self.table(BATCHES[1])

    def wait(self) -> None:
        self.announce_and_step()
        with self.optimizer._lock:
            pass


def in_time(action: Callable[[], Any]) -> Any:
    """Do something that would wait for ever if the worker did not come."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(action()), daemon=True)
    thread.start()
    thread.join(60)
    assert results, "nobody has done it"
    return results[0]


@pytest.mark.parametrize("has_worker", [False, True])
@pytest.mark.parametrize("action", [Loop.announce_and_step, Loop.look_up, Loop.wait])
def test_one_worker_whatever_interrupts(action: Callable[[Loop], None], has_worker: bool) -> None:
    def prepare() -> Loop:
        loop = Loop()
        end_worker()
        if has_worker:
            loop.table.prefetch(BATCHES[3])
            _ahead.finish_all()
        return loop

    usual = prepare()
    states = [usual.table.weight.detach().clone()]
    usual.announce_and_step()
    states.append(usual.table.weight.detach().clone())
    counted = prepare()
    for line in lines_of(lambda: action(counted), 40, PLACES):
        loop = prepare()
        Interrupter(line, places=PLACES).run(lambda: action(loop))  # noqa: B023
        rows = in_time(lambda: loop.table(BATCHES[1]).detach())  # noqa: B023
        weight = in_time(lambda: loop.table.weight.detach().clone())  # noqa: B023
        assert any(torch.equal(weight, state) for state in states)
        assert torch.equal(rows, weight[BATCHES[1]])
        assert workers() <= 1, line


def test_a_handler_may_start_the_worker_while_it_is_started() -> None:
    counted = Loop()
    end_worker()
    for line in lines_of(counted.announce_and_step, 40, PLACES):
        loop, other = Loop(), Loop()
        end_worker()
        Interrupter(line, other.look_up, PLACES).run(loop.announce_and_step)
        in_time(loop.table.weight.detach().clone)
        assert torch.equal(loop.table.weight, other.table.weight)
        assert workers() == 1, line


def test_where_no_thread_can_start_the_next_call_starts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, usual = Loop(), Loop()
    end_worker()

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(_ahead, "start_new_thread", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            loop.table.prefetch(BATCHES[1])
    for run in (loop, usual):
        run.look_up()
    assert torch.equal(loop.table.weight, usual.table.weight)


@pytest.mark.parametrize("kind", [SparseAdam, DeferredAdam])
def test_a_handler_may_wait_for_the_worker_while_somebody_waits(kind: Any) -> None:
    """Either of the two finds out what was skipped."""
    table = HostEmbedding(8, 2, device="cpu")
    optimizer = kind(table.parameters())

    def wait() -> None:
        with optimizer._lock:
            pass

    def prepare() -> None:
        table.prefetch(torch.tensor([3, 4]))
        table(torch.tensor([1, 2])).sum().backward()
        optimizer.step()

    prepare()
    for line in lines_of(wait, points=30, places=("/rowstep/_ahead",)):
        prepare()
        Interrupter(line, wait, places=("/rowstep/_ahead",)).run(wait)
        assert not optimizer._lock.finished

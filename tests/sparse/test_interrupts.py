"""Ctrl-C at any point of a step: a parameter has taken it, has not, or had no gradient in it; and the run goes on."""

from __future__ import annotations

import functools
import itertools
import signal
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import Parameter

from rowstep import SparseAdam, _torch_internals
from rowstep._kernels.workspace import Workspace
from rowstep._waiting import Waiting
from tests.helpers.gradients import rows_of
from tests.helpers.interrupts import Interrupter, interrupted, lines_of
from tests.helpers.whole_steps import (
    OPTIONS,
    Run,
    assert_on_its_way,
    assert_steps_survive,
    assert_waiting_survives,
    besides_steps,
    trajectories,
)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("name", OPTIONS)
def test_an_interrupt_at_any_line_of_a_step(name: str) -> None:
    def prepare() -> tuple[Run, Callable[[], None]]:
        run = Run(name)
        return run, run.step

    assert_steps_survive(name, interrupted(prepare))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("action", ["flush", "state_dict", "catch_up", "eps", "load_state_dict"])
def test_an_interrupt_at_any_line_of_what_a_deferred_optimizer_does_besides(action: str) -> None:
    def prepare() -> tuple[Run, Callable[[], object]]:
        run = Run("decayed")
        return run, besides_steps(run)[action]

    assert_waiting_survives(interrupted(prepare))


def test_an_interrupt_does_not_leave_autograd_off() -> None:
    """Right after a call into C, where Python handles signals."""
    run, was_interrupted, at = Run("sparse"), True, 0
    while was_interrupted:
        was_interrupted, at, returns = False, at + 1, itertools.count(1)

        def interrupt(frame: Any, event: str, _: Any, at: int = at, returns: Iterator[int] = returns) -> None:
            if frame.f_code.co_filename == _torch_internals.__file__ and event == "c_return" and next(returns) == at:
                raise KeyboardInterrupt

        sys.setprofile(interrupt)
        try:
            run.step()
        except KeyboardInterrupt:
            was_interrupted = True
        finally:
            sys.setprofile(None)
        assert torch.is_grad_enabled(), at
    assert at > 4


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("name", ["sparse", "deferred"])
def test_real_signals(name: str) -> None:
    """Of an alarm clock: most strike right behind a kernel, where Python looks for them first."""
    expected = trajectories(name, 5)
    struck = 0
    for delay in range(30):
        run = Run(name)

        def strike(*_: object) -> None:
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGALRM, strike)
        try:
            signal.setitimer(signal.ITIMER_REAL, 1e-4 * (1 + delay))
            for _ in range(5):
                run.step()
            signal.setitimer(signal.ITIMER_REAL, 0)  # here, where it may still strike
        except KeyboardInterrupt:
            struck += 1
        finally:
            signal.signal(signal.SIGALRM, before)
        assert_on_its_way(run, expected, of=2)
    assert struck > 0


@pytest.mark.parametrize("name", ["sparse", "deferred"])
def test_a_signal_handler_may_save_tables_in_the_middle_of_a_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As programs do that are told to leave: what the kernels have in hand is whole whenever Python can look."""
    monkeypatch.setenv("ROWSTEP_BACKEND", "numba")
    expected = trajectories(name, 3)
    for line in lines_of(Run(name).step):
        run = Run(name)
        Interrupter(line, functools.partial(assert_on_its_way, run, expected, of=2)).run(run.step)
        for table in run.optimizer._tables.values():
            pending = table.pending
            is_waiting = pending is not None and bool((pending.notes < pending.schedule.step).any())
            assert isinstance(table.param, Waiting) or not is_waiting
        assert_on_its_way(run, expected, of=2)
        run.step()
        assert_on_its_way(run, expected, of=2)


def test_a_signal_handler_may_replace_a_table_or_step_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a step: what the kernels have been told of stays memory until they return."""
    monkeypatch.setenv("ROWSTEP_BACKEND", "numba")
    for line in lines_of(Run("sparse").step):
        run = Run("sparse")
        param = run.params[0]

        def replace(param: torch.nn.Parameter = param) -> None:
            param.data = torch.full_like(param, 9.0)

        Interrupter(line, replace).run(run.step)
        moved = (param != 9.0).any(dim=1).tolist()
        assert not any(moved[row] for row in (0, 2, 3, 5))  # rows without a gradient are as they were put there
        run = Run("sparse")
        Interrupter(line, run.optimizer.step).run(run.step)
        assert all(count in (4, 5) for count in run.counts())  # the step that is under way has its count already
        run.step()


def test_what_kernels_are_told_of_is_held_until_they_return(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal's handler replaces a table and its gradient, whose memory is NumPy's and would be freed at once."""
    monkeypatch.setenv("ROWSTEP_BACKEND", "numba")
    run, seen = Workspace.run, []

    def world() -> tuple[Any, Any, dict[int, Any]]:
        rows, weights, values = torch.tensor([[0, 1, 1]]), np.ones((6, 2)), np.ones((3, 2))
        param = Parameter(torch.from_numpy(weights))
        grad = torch.sparse_coo_tensor(rows, torch.from_numpy(values), (6, 2), check_invariants=False)
        param.grad, optimizer = grad, SparseAdam([param])
        optimizer.step()
        return param, optimizer, {array.ctypes.data: weakref.ref(array) for array in (weights, values)}

    for line in lines_of(world()[1].step, points=60):
        param, optimizer, owners = world()

        def let_go(param: Any = param) -> None:
            param.data, param.grad = torch.zeros(6, 2, dtype=torch.float64), rows_of(param, [2])

        def looked_at(self: Workspace, owners: dict[int, Any] = owners) -> int:
            told = np.frombuffer(b"".join(self._words), np.int64).tolist()
            held = [owner() is not None for address, owner in owners.items() if address in told]
            assert all(held)
            seen.append(len(held) == 2 and param.data_ptr() not in owners)  # noqa: B023
            return run(self)

        with monkeypatch.context() as patched:
            patched.setattr(Workspace, "run", looked_at)
            Interrupter(line, let_go).run(optimizer.step)
    assert any(seen)

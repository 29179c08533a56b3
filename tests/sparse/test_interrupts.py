"""Ctrl-C at any point of a step: each parameter has taken its step whole or not at all, and the run goes on."""

from __future__ import annotations

import copy
import functools
import signal
from collections.abc import Callable

import pytest
import torch

from rowstep._waiting import Waiting
from tests.helpers.interrupts import Interrupter, interrupted, lines_of
from tests.helpers.whole_steps import OPTIONS, Run, assert_on_its_way, trajectories


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("name", OPTIONS)
def test_an_interrupt_at_any_line_of_a_step(name: str) -> None:
    expected = trajectories(name, 3)
    start = Run(name).counts()

    def prepare() -> tuple[Run, Callable[[], None]]:
        run = Run(name)
        return run, run.step

    taken = set()
    for run in interrupted(prepare):
        after = run.counts()
        assert all(count in (before, before + 1) for before, count in zip(start, after, strict=True))
        taken.add(tuple(after))
        assert_on_its_way(run, expected)
        run.step()
        run.step()
        assert_on_its_way(run, expected)
    assert len(taken) >= 3  # interrupts before, between and after launches: one makes the steps of several tables


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("action", ["flush", "state_dict", "catch_up", "load_state_dict", "betas"])
def test_an_interrupt_at_any_line_of_what_a_deferred_optimizer_does_besides(action: str) -> None:
    expected = trajectories("decayed", 2)

    def prepare() -> tuple[Run, Callable[[], object]]:
        run = Run("decayed")
        actions: dict[str, Callable[[], object]] = {
            "flush": run.optimizer.flush,
            "state_dict": run.optimizer.state_dict,
            "catch_up": lambda: run.optimizer.catch_up(run.params[0], torch.tensor([5, 0, 5])),
            "load_state_dict": lambda: run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict())),
            "betas": lambda: run.optimizer.param_groups[0].update(eps=1e-8) or run.optimizer.flush(),
        }
        return run, actions[action]

    for run in interrupted(prepare):
        assert_on_its_way(run, expected)
        run.step()
        assert_on_its_way(run, expected)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("name", ["sparse", "deferred"])
def test_real_signals(name: str) -> None:
    """Of an alarm clock: most strike right behind a kernel, where Python looks for them first."""
    steps = 200
    expected = trajectories(name, steps)
    run, struck, is_armed = Run(name), 0, False

    def strike(*_: object) -> None:
        nonlocal is_armed
        if is_armed:
            is_armed = False
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, strike)
    signal.setitimer(signal.ITIMER_REAL, 0.003, 0.003)
    try:
        for _ in range(steps // 2):
            try:
                is_armed = True
                run.step()
                is_armed = False
            except KeyboardInterrupt:
                struck += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert struck > 0
    assert_on_its_way(run, expected)


@pytest.mark.parametrize("name", ["sparse", "deferred"])
def test_a_signal_handler_may_save_tables_in_the_middle_of_a_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As programs do that are told to leave: what the kernels have in hand is whole whenever Python can look."""
    monkeypatch.setenv("ROWSTEP_BACKEND", "numba")
    expected = trajectories(name, 3)
    for line in lines_of(Run(name).step):
        run = Run(name)
        Interrupter(line, functools.partial(assert_on_its_way, run, expected, of=2)).run(run.step)
        for param, deferral in getattr(run.optimizer, "_deferrals", {}).items():
            assert isinstance(param, Waiting) or not (deferral.notes < deferral.schedule.step).any()
        assert_on_its_way(run, expected)
        run.step()
        assert_on_its_way(run, expected)

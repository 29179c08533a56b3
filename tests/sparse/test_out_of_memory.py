"""Memory that runs out in the middle: a parameter has taken its step, or has not, or its rows had no gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from rowstep import _schedule
from rowstep._kernels.workspace import Workspace
from tests.helpers.deferred_cases import LONG, Twins, embedding
from tests.helpers.whole_steps import (
    OPTIONS,
    Run,
    assert_on_its_way,
    assert_steps_survive,
    assert_waiting_survives,
    besides_steps,
    trajectories,
)

# What a full memory looks like from torch, and from NumPy.
NO_MEMORY = (RuntimeError, MemoryError)

# They take no memory. In a mode as below, torch does not note that the first of them has changed a tensor.
IN_PLACE = ("aten._foreach_add_.Scalar", "aten._fused_adam_.default", "aten._fused_adamw_.default")


class Scarcity(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Memory that runs out at the ``at``-th operation of torch; at none, it counts them."""

    def __init__(self, at: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations, self._at = 0, at

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func) not in IN_PLACE:
            self.operations += 1
            if self.operations == self._at:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return func(*args, **(kwargs or {}))


def after_scarcity(prepare: Callable[[], Any], action: Callable[[Any], object]) -> Iterator[Any]:
    """The world that ``prepare`` makes, after memory ran out at one operation of an action, for many of them."""
    world = prepare()
    with Scarcity() as counter:
        action(world)
    assert counter.operations > 3
    for at in range(1, counter.operations + 1, 1 if LONG else counter.operations // 15 + 1):
        world = prepare()
        with pytest.raises(NO_MEMORY, match="allocate"), Scarcity(at):
            action(world)
        yield world


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("name", OPTIONS)
def test_memory_that_runs_out_in_a_step(name: str) -> None:
    assert_steps_survive(name, after_scarcity(lambda: Run(name), Run.step))


@pytest.mark.parametrize("action", ["flush", "state_dict", "catch_up", "eps"])
def test_memory_that_runs_out_while_rows_catch_up(action: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROWSTEP_BACKEND", "reference")  # the kernels ask torch for nothing
    assert_waiting_survives(after_scarcity(lambda: Run("decayed"), lambda run: besides_steps(run)[action]()))


def test_no_memory_for_the_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    twins = Twins(embedding(6), lr=0.1)
    twins.look_up(*range(6))

    def refuse(*_: object) -> None:
        raise MemoryError("no room for the schedule")

    with monkeypatch.context() as patch:
        patch.setattr(_schedule.Schedule, "advanced", refuse)
        with pytest.raises(MemoryError, match="no room"):
            twins.look_up(1, 2)  # torch's side has not stepped
    for _ in range(3):
        twins.look_up(0, 2)
    twins.look_up(3)
    twins.assert_same()


@pytest.mark.parametrize("name", ["sparse", "deferred"])
def test_no_memory_for_what_kernels_work_with(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy gives it, outside of torch's operations."""
    monkeypatch.setenv("ROWSTEP_BACKEND", "numba")
    expected, run = trajectories(name, 3), Run(name)
    before = run.counts()

    def refuse(*_: object) -> None:
        raise MemoryError("Unable to allocate 1.0 TiB")

    with monkeypatch.context() as patch:
        patch.setattr(Workspace, "reserve", refuse)
        with pytest.raises(MemoryError, match="Unable to allocate"):
            run.step()
    assert run.counts()[:2] == before[:2]  # those of the tables
    assert_on_its_way(run, expected, of=2)
    run.step()
    assert_on_its_way(run, expected, of=2)

"""Hooks and closures that raise: the next step works."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest

from rowstep import SparseAdam
from tests.helpers.gradients import Snapshot
from tests.helpers.whole_steps import Run, assert_on_its_way, trajectories


class RefusedError(Exception):
    """What users' code raises here."""


def refuse(*_: object, **__: object) -> None:
    raise RefusedError


@pytest.fixture(params=["sparse", "deferred"])
def run(request: pytest.FixtureRequest, backend: str) -> Run:
    return Run(request.param)


HOOKS = [f"{what}_{when}" for what in ("step", "state_dict", "load_state_dict") for when in ("pre", "post")]


@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_of_the_optimizer_that_raise(run: Run, hook: str) -> None:
    name = "sparse" if isinstance(run.optimizer, SparseAdam) else "deferred"
    expected, start = trajectories(name, 3), run.counts()
    other = copy.deepcopy(run.optimizer.state_dict())
    for state in other["state"].values():
        state["exp_avg"].fill_(9.0)
    acts: dict[str, Callable[[], object]] = {
        "step": run.step, "state": run.optimizer.state_dict, "load": lambda: run.optimizer.load_state_dict(other),
    }  # fmt: skip
    handle = getattr(run.optimizer, f"register_{hook}_hook")(refuse)
    with pytest.raises(RefusedError):
        acts[hook.partition("_")[0]]()
    handle.remove()
    assert run.counts() == [count + (hook == "step_post") for count in start]
    assert_on_its_way(run, expected)
    run.step()
    assert_on_its_way(run, expected)


def test_a_closure_that_raises(run: Run) -> None:
    before = Snapshot(run.optimizer)
    with pytest.raises(RefusedError):
        run.optimizer.step(refuse)
    before.assert_unchanged()
    run.step()

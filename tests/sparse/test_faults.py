"""Hooks and closures that raise: the next step works."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rowstep import SparseAdam
from tests.helpers.deferred_cases import RATE, Twins, embedding
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


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    ("hook", "act"),
    [
        ("forward", lambda model: model(torch.tensor([1, 2]))),
        ("state_dict_pre", lambda model: model.state_dict()),
        ("load_state_dict_post", lambda model: model.load_state_dict(copy.deepcopy(model.state_dict()))),
    ],
)
def test_hooks_of_a_module_that_raise(hook: str, act: Callable[[Any], object]) -> None:
    twins = Twins(embedding(10), lr=RATE, weight_decay=0.1)
    twins.run(5, rows=10)
    twins.each(lambda model, optimizer: optimizer.zero_grad())
    handle = getattr(twins.model, f"register_{hook}_hook")(refuse)
    with pytest.raises(RefusedError):
        act(twins.model)
    handle.remove()
    twins.run(5, rows=10)
    twins.assert_same()

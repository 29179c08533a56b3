"""A flushed state dict is torch's: it loads there and theirs load here, in the middle of a run."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from rowstep import DeferredAdam, SparseAdam
from tests.helpers.copies import through_a_file
from tests.helpers.deferred_cases import (
    BAR,
    Twins,
    assert_same_parameter,
    distance,
    embedding,
    in_memory,
    waiting,
    zipf,
)
from tests.helpers.gradients import Snapshot, rows_of, step_with, table

pytestmark = pytest.mark.usefixtures("backend")

OPTIONS: list[dict[str, Any]] = [
    {"lr": 0.01},
    {"lr": 0.02, "betas": (0.5, 0.99), "eps": 1e-6, "maximize": True},
    {"weight_decay": 0.1, "amsgrad": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_ours_loads_into_torchs_and_the_run_goes_on(options: dict[str, Any]) -> None:
    twins = waiting(**options)
    new = (torch.optim.AdamW if "weight_decay" in options else torch.optim.Adam)(twins.model.parameters())
    new.load_state_dict(through_a_file(twins.ours.state_dict()))
    assert new.param_groups[0]["betas"] == twins.theirs.param_groups[0]["betas"]
    twins.model.sparse = False
    for _ in range(15):
        batch, goal = zipf(40, 4), torch.randn(4, 3, dtype=torch.float64)
        for model, optimizer in ((twins.model, new), (twins.twin, twins.theirs)):
            optimizer.zero_grad()
            (model(batch) - goal).square().mean().backward()
            optimizer.step()
    assert_same_parameter(new, twins.model.weight, twins.theirs, twins.twin.weight)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_torchs_loads_into_ours_and_the_run_goes_on(options: dict[str, Any]) -> None:
    twins = waiting(**options)
    twins.theirs.param_groups[0]["fused"] = "amsgrad" in options
    start = copy.deepcopy(twins.twin.state_dict())
    twins.ours = type(twins.ours)(twins.model)
    twins.model.load_state_dict(start)
    twins.ours.load_state_dict(through_a_file(twins.theirs.state_dict()))
    assert twins.ours.param_groups[0]["lr"] == twins.theirs.param_groups[0]["lr"]
    twins.run(20, rows=40)
    assert distance(in_memory(twins.model.weight), twins.twin.weight) > BAR
    twins.assert_same()


def test_a_state_that_cannot_be_deferred_is_refused_and_nothing_has_changed() -> None:
    twins = Twins(embedding(), lr=0.01)
    twins.run(16, rows=40)
    twins.ours.flush()
    before = Snapshot(twins.ours)
    adam = torch.optim.Adam(twins.twin.parameters(), weight_decay=0.1)
    with pytest.raises(ValueError, match=r"in group 0 of the loaded state; expected 0, because L2.*Use DeferredAdamW"):
        twins.ours.load_state_dict(adam.state_dict())
    adam = torch.optim.Adam(twins.twin.parameters(), betas=(0.99, 0.9))
    with pytest.raises(ValueError, match=r"Invalid betas: \(0.99, 0.9\) in group 0 of the loaded state"):
        twins.ours.load_state_dict(adam.state_dict())
    before.assert_unchanged()
    twins.run(5, rows=40)
    twins.assert_same()


def test_a_state_of_sparse_adam_goes_on() -> None:
    param = table(6, 2)
    first = SparseAdam([param])
    step_with(first, param, rows_of(param, [1, 2]))
    second = DeferredAdam([param])
    second.load_state_dict(through_a_file(first.state_dict()))
    second.catch_up(param, torch.tensor([2, 3]))
    step_with(second, param, rows_of(param, [2, 3]))
    assert second.state[param]["step"] == 2
    second.flush()

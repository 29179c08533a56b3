"""All six kinds of hooks of a torch optimizer, in their order, and removable."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim import Optimizer
from torch.optim.optimizer import StateDict

from rowstep import SparseAdam
from tests.helpers.gradients import rows_of, same_bits, step_with, table


@pytest.fixture
def optimizer() -> SparseAdam:
    param = table(4, 2)
    param.grad = rows_of(param, [1])
    return SparseAdam([param])


def test_step_hooks_run_before_and_after_the_step_until_removed(optimizer: SparseAdam, backend: str) -> None:
    (param,) = optimizer.param_groups[0]["params"]
    start = param.detach().clone()
    seen: list[tuple[str, bool]] = []

    def before(self: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert self is optimizer
        seen.append(("before", same_bits(param, start)))

    def after(self: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(("after", same_bits(param, start)))

    handles = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
    optimizer.step()
    assert seen == [("before", True), ("after", False)]
    for handle in handles:
        handle.remove()
    optimizer.step()
    assert len(seen) == 2


def test_state_dict_hooks_run_in_order_and_may_replace_the_result(optimizer: SparseAdam) -> None:
    seen: list[str] = []

    def after(self: Optimizer, state_dict: StateDict) -> StateDict:
        seen.append("after")
        return {**state_dict, "mine": 1}

    handles = [
        optimizer.register_state_dict_pre_hook(lambda self: seen.append("before")),
        optimizer.register_state_dict_pre_hook(lambda self: seen.append("before, first"), prepend=True),
        optimizer.register_state_dict_post_hook(after),
        optimizer.register_state_dict_post_hook(lambda self, saved: seen.append("after, first"), prepend=True),
    ]
    assert optimizer.state_dict()["mine"] == 1
    assert seen == ["before, first", "before", "after, first", "after"]
    for handle in handles:
        handle.remove()
    assert "mine" not in optimizer.state_dict()
    assert len(seen) == 4


def test_a_load_pre_hook_may_replace_what_is_loaded(optimizer: SparseAdam) -> None:
    def replace(self: Optimizer, given: StateDict) -> StateDict:
        groups = [{**group, "lr": 0.75} for group in given["param_groups"]]
        return {**given, "param_groups": groups}

    optimizer.register_load_state_dict_pre_hook(replace)
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.75


def test_load_hooks_run_in_order_until_removed_and_see_a_complete_state(backend: str) -> None:
    param = table(4, 2, dtype=torch.bfloat16)
    optimizer = SparseAdam([param], bias_correction="row")
    step_with(optimizer, param, rows_of(param, [1]))
    saved = optimizer.state_dict()
    del saved["param_groups"][0]["weight_decay"]
    seen: list[Any] = []

    def look(self: Optimizer) -> None:
        seen.append((self.state[param]["row_step"].dtype, self.param_groups[0]["weight_decay"]))

    handles = [
        optimizer.register_load_state_dict_pre_hook(lambda self, given: seen.append("before")),
        optimizer.register_load_state_dict_pre_hook(lambda self, given: seen.append("before, first"), prepend=True),
        optimizer.register_load_state_dict_post_hook(look),
        optimizer.register_load_state_dict_post_hook(lambda self: seen.append("after, first"), prepend=True),
    ]
    for _ in range(2):
        optimizer.load_state_dict(saved)
        for handle in handles:
            handle.remove()
    assert seen == ["before, first", "before", "after, first", (torch.int64, 0.0)]

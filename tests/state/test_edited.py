"""A state that is cleared or set by hand in mid-run, and parameters that have none."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from rowstep import DeferredAdam, DeferredAdamW, SparseAdam
from tests.helpers.deferred_cases import embedding, waiting
from tests.helpers.gradients import Snapshot, rows_of, set_grad, step_with, table
from tests.helpers.state_runs import KINDS, Kind, Run

pytestmark = pytest.mark.usefixtures("backend")


@KINDS
@pytest.mark.parametrize("inner", [False, True])
def test_a_cleared_state_begins_anew(kind: Kind, inner: bool) -> None:
    run = Run(kind)
    if inner:
        for state in run.optimizer.state.values():
            state.clear()
    else:
        run.optimizer.state.clear()
    run.step()
    assert [int(run.optimizer.state[param]["step"]) for _, param in run.params] == [1, 1, 1]


@pytest.mark.parametrize("way", ["all", "one", "moments"])
def test_what_waits_is_settled_when_a_state_is_cleared_or_replaced(way: str) -> None:
    """Rows that wait do so under the moments they had, whatever is written into the state."""
    runs = []
    for edited in (False, True):
        torch.manual_seed(0)
        module = embedding(6, 3)
        optimizer = DeferredAdamW(module, lr=0.1, weight_decay=0.1)
        for ids in ([0, 1, 2, 3, 4, 5], [1], [1], [1]):
            optimizer.zero_grad()
            module(torch.tensor(ids)).square().sum().backward()
            optimizer.step()
        state = optimizer.state[module.weight]
        if not edited:
            optimizer.flush()
        elif way == "all":
            optimizer.state.clear()
        elif way == "one":
            state.clear()
        else:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(module.weight), torch.ones_like(module.weight)
        runs.append(module(torch.arange(6)).detach())
    torch.testing.assert_close(runs[0], runs[1])


@pytest.mark.parametrize("count", [7, torch.tensor(7.0)])
def test_a_count_that_is_set_while_rows_wait_is_the_one_from_which_the_next_step_goes_on(count: Any) -> None:
    """As with torch.optim.Adam; what rows have waited for so far, they take with the old one."""
    module, dense = embedding(6, 3), table(6, 3, dtype=torch.float64)
    dense.data.copy_(module.weight.data)
    ours, theirs = DeferredAdam(module, lr=0.1), torch.optim.Adam([dense], lr=0.1)
    for number, ids in enumerate([[0, 1, 2, 3, 4, 5], [1], [1], [1], [2], [2]]):
        if number == 4:
            ours.state[module.weight]["step"] = copy.deepcopy(count)
            theirs.state[dense]["step"] = torch.tensor(7.0)
        grad = rows_of(dense, ids)
        ours.catch_up(module.weight, torch.tensor(ids))
        step_with(ours, module.weight, grad)
        step_with(theirs, dense, grad.to_dense())
    ours.flush()
    torch.testing.assert_close(module.weight, dense, rtol=1e-13, atol=1e-13)
    assert int(ours.state[module.weight]["step"]) == 9


def test_a_refused_state_dict_leaves_rows_waiting() -> None:
    optimizer = waiting().ours
    before = Snapshot(optimizer)
    with pytest.raises(ValueError, match="expected an integer step count"):
        optimizer.load_state_dict({**DeferredAdamW(embedding()).state_dict(), "state": {0: {"step": -1}}})
    before.assert_unchanged()


@KINDS
@pytest.mark.parametrize("dtype", [torch.int64, torch.float8_e4m3fn])
def test_a_parameter_that_cannot_be_stepped_may_be_in_the_list(kind: Kind, dtype: torch.dtype) -> None:
    frozen, weights = nn.Parameter(torch.ones(6, 3).to(dtype), requires_grad=False), table(6, 3)
    optimizer: Any = kind([frozen, weights], lr=0.1)
    step_with(optimizer, weights, rows_of(weights, [1]))
    assert frozen.float().tolist() == torch.ones(6, 3).tolist()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    before = weights.detach().clone()
    if dtype == torch.int64:
        frozen.grad = torch.ones(6, 3, dtype=dtype)
    else:
        set_grad(frozen, rows_of(weights, [1]) if kind is SparseAdam else torch.ones(6, 3))
    with pytest.raises(TypeError, match=rf"parameter 0 of group 0: .*{dtype}; expected a 16-, 32- or 64-bit"):
        optimizer.step()
    assert torch.equal(weights, before)


@pytest.mark.parametrize("cls", [SparseAdam, DeferredAdam])
@pytest.mark.parametrize("wide", [False, True])
def test_amsgrad_that_is_turned_on_beside_moments_of_another_dtype(cls: Any, wide: bool) -> None:
    """The maximum is made in the dtype of the moments, or it could not hold what they are: 1e40 is inf in float32."""
    narrow, large = torch.float32, torch.float64
    param = nn.Parameter(torch.ones(400, 3, dtype=narrow if wide else large))
    optimizer = cls([param], lr=0.1)
    step_with(optimizer, param, rows_of(param, torch.arange(400), 2.0))
    optimizer.state_dict()  # brings every row up to date
    state = optimizer.state[param]
    state |= {name: state[name].to(large if wide else narrow) for name in ("exp_avg", "exp_avg_sq")}
    optimizer.param_groups[0]["amsgrad"] = True
    for _ in range(3):
        step_with(optimizer, param, rows_of(param, torch.arange(400), 3.0))
    assert torch.equal(state["max_exp_avg_sq"], state["exp_avg_sq"])
    assert state["max_exp_avg_sq"].dtype == state["exp_avg_sq"].dtype

"""Gradients as they come: accumulated, empty, missing, dense, over other dimensions, and in any rhythm."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from rowstep import DeferredAdam
from tests.helpers.deferred_cases import Twins, assert_same_parameter, embedding, optimizers, zipf
from tests.helpers.gradients import copy_of, sparse, step_with, table

pytestmark = pytest.mark.usefixtures("backend")


def pair(*shape: int, **options: Any) -> tuple[Parameter, DeferredAdam, Parameter, torch.optim.Optimizer]:
    """A float64 table and its optimizer, twice."""
    param = table(*shape, dtype=torch.float64)
    twin = copy_of(param)
    ours, theirs = optimizers([param], [twin], **({"weight_decay": 0.1, "lr": 0.01} | options))
    return param, ours, twin, theirs


def test_no_gradient_is_no_step() -> None:
    twins = Twins(embedding())
    twins.each(lambda model, optimizer: optimizer.step())
    assert not twins.ours.state
    twins.run(3, rows=40)
    twins.each(lambda model, optimizer: (optimizer.zero_grad(), optimizer.step(), optimizer.step()))
    assert twins.ours.state[twins.model.weight]["step"] == 3
    twins.run(3, rows=40)
    twins.assert_same()


def test_a_parameter_without_dimensions() -> None:
    param, ours, twin, theirs = pair()
    for value in (1.0, -2.0, 0.5):
        grad = sparse(torch.empty(0, 1, dtype=torch.int64), torch.tensor([value], dtype=torch.float64), ())
        step_with(ours, param, grad)
        step_with(theirs, twin, torch.tensor(value, dtype=torch.float64))
    ours.flush()
    assert_same_parameter(ours, param, theirs, twin)


def test_a_closure() -> None:
    twins = Twins(embedding())
    for _ in range(5):
        batch, goal = zipf(40, 4), torch.randn(4, 3, dtype=torch.float64)

        def step(model: Any, optimizer: Any, batch: Tensor = batch, goal: Tensor = goal) -> None:
            def closure() -> Any:
                optimizer.zero_grad()
                loss = (model(batch) - goal).square().mean()
                loss.backward()
                return loss

            assert optimizer.step(closure) > 0

        twins.each(step)
    twins.assert_same()


@pytest.mark.parametrize("sparse_dim", [0, 1, 2])
def test_sixteen_bit_duplicates_are_summed_in_float32(sparse_dim: int) -> None:
    param = nn.Parameter(torch.zeros(3, 2, dtype=torch.bfloat16))
    optimizer = DeferredAdam([param], betas=(0.0, 0.5))  # the first moment is then the summed gradient
    indices = torch.ones(2, 1000, dtype=torch.int64)[:sparse_dim]
    values = torch.ones(1000, *param.shape[sparse_dim:], dtype=torch.bfloat16)
    step_with(optimizer, param, sparse(indices, values, param.shape))
    assert optimizer.state[param]["exp_avg"][1, 1] == 1000


@pytest.mark.parametrize("sparse_dim", [0, 1, 2])
def test_duplicates_are_summed_as_widely_as_the_state(sparse_dim: int) -> None:
    """A float32 gradient of a table that was float64: 1e8 + 1 - 1e8 is 0 in float32."""
    param = table(1, 1)
    param.data.zero_()
    optimizer = DeferredAdam([param], lr=0.1)
    optimizer.state[param] = {key: torch.zeros(1, 1, dtype=torch.float64) for key in ("exp_avg", "exp_avg_sq")}
    optimizer.state[param]["step"] = 0
    values = torch.tensor([1e8, 1.0, -1e8]).reshape(3, *[1] * (2 - sparse_dim))
    step_with(optimizer, param, sparse(torch.zeros(sparse_dim, 3, dtype=torch.int64), values, (1, 1)))
    assert param.item() == pytest.approx(-0.1)

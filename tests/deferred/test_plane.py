"""Any betas that are accepted: rows that nobody touches stay numbers, and rows that somebody did are dense Adam's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rowstep import DeferredAdam
from tests.helpers.deferred_cases import embedding, only_long, optimizers, step_caught_up
from tests.helpers.gradients import copy_of, rows_of, same_bits, step_with

pytestmark = pytest.mark.usefixtures("backend")

DTYPES = [torch.bfloat16, torch.float32, torch.float64]


def wait(optimizer: Optimizer, param: Tensor, steps: int) -> None:
    """Steps that touch no row."""
    nothing = rows_of(param, [])
    for _ in range(steps):
        step_with(optimizer, param, nothing if isinstance(optimizer, DeferredAdam) else torch.zeros_like(param))


# Betas, and after how many steps their e have outgrown float32, or float64 for the smaller ones.
STEEP: list[Any] = [((0.95, 0.95), 900), ((0.3, 0.1), 150)]
STEEP += [
    pytest.param(betas, 900, marks=only_long)
    for betas in [(0.9, 0.92), (0.9, 0.9), (0.95, 0.94), (0.8, 0.8), (0.5, 0.5), (0.98, 0.98), (0.9, 0.85), (0.3, 0.1)]
]


@pytest.mark.parametrize(("betas", "steps"), STEEP, ids=str)
def test_rows_that_nobody_touches_stay_as_they_are(betas: tuple[float, float], steps: int) -> None:
    tables = [embedding(3, 2, dtype=dtype) for dtype in DTYPES]
    before = [table.weight.detach().clone() for table in tables]
    optimizer = DeferredAdam(nn.ModuleList(tables), lr=0.01, betas=betas)
    torch.autograd.backward([table(torch.tensor([0])).sum() for table in tables])
    optimizer.step()
    for table in tables:
        table.weight.grad = rows_of(table.weight, [])
    for _ in range(steps):
        optimizer.step()
    for table, start in zip(tables, before, strict=True):
        assert same_bits(table(torch.tensor([1])), start[1:2])
    moments = optimizer.state_dict()["state"]
    for index, (table, start) in enumerate(zip(tables, before, strict=True)):
        assert same_bits(table.weight[1:], start[1:])
        assert table.weight.isfinite().all()
        for key in ("exp_avg", "exp_avg_sq"):
            assert not moments[index][key][1:].any()
            assert moments[index][key].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize(("eps", "lr"), [(1e-50, 1e30), (1e-38, 1e-30), (1e4, 1e30)])
def test_eps_and_lr_may_be_extreme(dtype: torch.dtype, eps: float, lr: float) -> None:
    """An eps that float32 rounds to 0 divides no row that has no gradient."""
    param = nn.Parameter(torch.ones(3, 2, dtype=dtype))
    optimizer = DeferredAdam([param], lr=lr, betas=(0.9, 0.9), eps=eps)
    step_caught_up(optimizer, param, rows_of(param, [0], 1.0))
    wait(optimizer, param, 60)
    optimizer.flush()
    assert same_bits(param[1:], torch.ones(2, 2, dtype=dtype))
    assert param.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.5, 0.5)], ids=str)
def test_what_is_not_finite_is_where_it_is_in_dense_adam(betas: tuple[float, float], dtype: torch.dtype) -> None:
    """After 1,100 steps half to their power is no float64 any more, and 0 times infinity no number."""
    param = nn.Parameter(torch.ones(8, 2, dtype=dtype))
    twin = copy_of(param)
    ours, theirs = optimizers([param], [twin], weight_decay=0.1, lr=0.01, betas=betas, eps=1e-4)
    step_caught_up(ours, param, rows_of(param, range(7), 1.0))
    step_caught_up(theirs, twin, rows_of(twin, range(7), 1.0))
    for one, optimizer in ((param, ours), (twin, theirs)):
        state = optimizer.state[one]
        with torch.no_grad():
            state["exp_avg"][0], state["exp_avg"][1], state["exp_avg"][2] = torch.nan, torch.inf, 1e-7
            state["exp_avg_sq"][3], state["exp_avg_sq"][4] = torch.inf, torch.nan
            one[5] = torch.inf
    for steps in (1, 1100 if betas[1] == 0.5 else 20):
        wait(ours, param, steps)
        wait(theirs, twin, steps)
        ours.flush()
        assert torch.equal(param.isfinite(), twin.isfinite())
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(ours.state[param][key].isfinite(), theirs.state[twin][key].isfinite())
        assert (ours.state[param]["exp_avg_sq"][3] == torch.inf).all()

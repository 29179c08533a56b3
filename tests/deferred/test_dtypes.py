"""Below float64: a run is not farther from the float64 truth than torch's own dense run of the same dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from rowstep import DeferredAdam, DeferredAdamW
from tests.helpers.deferred_cases import LONG, embedding, optimizers, rms, step_caught_up, zipf
from tests.helpers.gradients import rows_of, step_with

pytestmark = pytest.mark.usefixtures("backend")


def distances(dtype: torch.dtype, steps: int, scale: float, **options: Any) -> dict[str, tuple[float, float]]:
    """How far the reads, and the flushed table, are from a dense float64 run: ours, and torch's own in ``dtype``."""
    rows = 300
    start = torch.randn(rows, 4, dtype=torch.float64).to(dtype)
    ours, dense = embedding(rows, 4, dtype=dtype), nn.Embedding(rows, 4, dtype=dtype)
    truth = nn.Embedding(rows, 4, dtype=torch.float64)
    for model in (ours, dense, truth):
        model.load_state_dict({"weight": start})
    optimizer, exact = optimizers(ours, truth, **options)
    _, theirs = optimizers([embedding(1, 1).weight], dense, **options)
    far: dict[str, list[float]] = {"ours": [], "theirs": []}
    for _ in range(steps):
        ids, goal = zipf(rows, 12), torch.randn(12, 4, dtype=torch.float64)
        reads = []
        for model, one in ((truth, exact), (ours, optimizer), (dense, theirs)):
            one.zero_grad()
            reads.append(model(ids))
            torch.autograd.backward(scale * (reads[-1].double() - goal).square().mean())
            one.step()
        far["ours"].append(rms(reads[1], reads[0]) ** 2)
        far["theirs"].append(rms(reads[2], reads[0]) ** 2)
    optimizer.flush()
    return {
        "reads": ((sum(far["ours"]) / steps) ** 0.5, (sum(far["theirs"]) / steps) ** 0.5),
        "table": (rms(ours.weight, truth.weight), rms(dense.weight, truth.weight)),
    }


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}], ids=str)
@pytest.mark.parametrize("scale", [1.0, 1e-6])
def test_float32_is_closer_to_the_truth_than_torchs_own(backend: str, scale: float, options: dict[str, Any]) -> None:
    steps = 3000 if LONG else 450 if backend == "numba" else 150
    found = distances(torch.float32, steps, scale, lr=1e-3, **options)
    assert found["reads"][0] <= found["reads"][1] < 1e-4
    assert found["table"][0] <= found["table"][1] < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bits_run_and_stay_close(backend: str, dtype: torch.dtype) -> None:
    """The moments have the parameter's dtype, as torch's; the loss is scaled so that float16 can hold their squares."""
    found = distances(dtype, 400 if backend == "numba" else 100, 100.0, lr=0.01, eps=1e-4)
    assert found["reads"][0] <= found["reads"][1]
    assert found["table"][0] <= found["table"][1]
    assert max(found["reads"][0], found["table"][0]) < 0.05


def test_a_row_of_float32_waits_as_long_as_it_likes() -> None:
    """The stride is one rounding; torch's dense float32 has one at each of the steps."""
    model, truth = embedding(3, 4, dtype=torch.float32), nn.Embedding(3, 4, dtype=torch.float64)
    truth.load_state_dict(model.state_dict())
    optimizer, exact = optimizers(model, truth, weight_decay=0.01, lr=0.01)
    values = torch.randn(3, 4)
    step_with(optimizer, model.weight, rows_of(model.weight, [0, 1, 2], values))
    step_with(exact, truth.weight, values.double())
    for _ in range(400):
        step_with(optimizer, model.weight, rows_of(model.weight, []))
        step_with(exact, truth.weight, torch.zeros(3, 4, dtype=torch.float64))
    optimizer.flush()
    torch.testing.assert_close(model.weight.double(), truth.weight, rtol=3e-7, atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_moments_that_vanish_leave_numbers(dtype: torch.dtype) -> None:
    """The square of a tiny gradient is 0 in a short dtype, and old momentum becomes 0 instead of a denormal number."""
    param = nn.Parameter(torch.ones(4, 2, dtype=dtype))
    optimizer = DeferredAdam([param])
    step_caught_up(optimizer, param, rows_of(param, [0, 1, 2], 1e-7))
    step_caught_up(optimizer, param, rows_of(param, [1], 1e-30 if dtype != torch.float16 else 1e-7))
    for _ in range(700):
        step_with(optimizer, param, rows_of(param, []))
    optimizer.flush()
    assert param.isfinite().all()
    assert (optimizer.state[param]["exp_avg"] == 0).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_numbers_that_are_not_finite_stay_in_their_rows(bad: float) -> None:
    param, dense = (nn.Parameter(torch.ones(4, 2, dtype=torch.float64)) for _ in range(2))
    optimizer, theirs = DeferredAdamW([param]), torch.optim.AdamW([dense])
    for ids, value in (([1, 2], 1.0), ([2], bad), ([3], 1.0), ([0], 1.0)):
        step_caught_up(optimizer, param, rows_of(param, ids, value))
        step_caught_up(theirs, dense, rows_of(dense, ids, value))
    optimizer.flush()
    assert not param[2].isfinite().any()
    torch.testing.assert_close(param, dense, rtol=0, atol=1e-15, equal_nan=True)


def test_a_maximum_is_not_rounded_to_a_narrower_state() -> None:
    """amsgrad switched on in the middle of a run, after the table has become wider than its state."""
    param = nn.Parameter(torch.ones(4, 2, dtype=torch.bfloat16))
    optimizer = DeferredAdam([param], betas=(0.0, 0.9))
    param.grad = torch.sparse_coo_tensor(
        torch.tensor([[1]]), torch.full((1, 2), 1.3, dtype=torch.bfloat16), (4, 2), check_invariants=False
    )
    optimizer.step()
    param.grad = None
    second = optimizer.state_dict()["state"][0]["exp_avg_sq"].float()
    param.data = param.data.float()
    optimizer.param_groups[0]["amsgrad"] = True
    param.grad = torch.sparse_coo_tensor(
        torch.empty(1, 0, dtype=torch.int64), torch.empty(0, 2), (4, 2), check_invariants=False
    )
    optimizer.step()
    torch.testing.assert_close(optimizer.state_dict()["state"][0]["max_exp_avg_sq"], second * 0.9, rtol=1e-6, atol=0)

"""Each option against the same rule computed by hand in float64, and against what it means in one number."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rowstep import SparseAdam
from tests.helpers.by_hand import AdamByHand
from tests.helpers.gradients import copy_of, rows_of, same_bits, step_with, table

pytestmark = pytest.mark.usefixtures("backend")

OPTIONS: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.1, "maximize": True},
    {"weight_decay": 2.0, "decoupled_weight_decay": True},
    {"amsgrad": True},
    {"bias_correction": "row"},
    {"weight_decay": 0.1, "amsgrad": True, "bias_correction": "row", "nonfinite": "skip", "maximize": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_trajectory_is_the_one_computed_by_hand(options: dict[str, Any]) -> None:
    param = table(10, 3, dtype=torch.float64)
    hand = AdamByHand(param, lr=0.01, betas=(0.8, 0.95), eps=1e-4, **options)
    optimizer = SparseAdam([param], lr=0.01, betas=(0.8, 0.95), eps=1e-4, **options)
    for step in range(25):
        ids = torch.randint(len(param), (8,))
        # The size varies, so that amsgrad's maximum is not the last.
        values = torch.randn(8, 3, dtype=torch.float64) * (1 + 5 * (step % 4 == 0))
        step_with(optimizer, param, rows_of(param, ids, values))
        hand.step(ids.tolist(), values)
    expected = {"exp_avg": hand.m, "exp_avg_sq": hand.v}
    if hand.amsgrad:
        expected["max_exp_avg_sq"] = hand.v_max
    for key, value in expected.items():
        torch.testing.assert_close(optimizer.state[param][key], value, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(param.detach(), hand.p, rtol=1e-12, atol=1e-15)
    assert optimizer.state[param]["step"] == 25
    if hand.bias_correction == "row":
        assert optimizer.state[param]["row_step"].tolist() == hand.row_steps


def test_a_dense_gradient_under_row_bias_correction_steps_as_under_adam() -> None:
    """A tied table whose gradient is dense from some step on goes on as under torch's Adam; every row counts a step."""
    ours = table(6, 3)
    optimizer = SparseAdam([ours], bias_correction="row")
    step_with(optimizer, ours, rows_of(ours, [1, 4]))
    theirs = copy_of(ours)
    reference = torch.optim.Adam([theirs], fused=True)
    state = optimizer.state[ours]
    moments = {key: state[key].clone() for key in ("exp_avg", "exp_avg_sq")}
    reference.state[theirs] = {"step": torch.tensor(1.0), **moments}
    for _ in range(3):
        grad = torch.randn(6, 3)
        step_with(optimizer, ours, grad)
        step_with(reference, theirs, grad)
    assert same_bits(ours, theirs)
    assert int(optimizer.state[ours]["step"]) == 4
    assert optimizer.state[ours]["row_step"].tolist() == [3, 4, 3, 3, 4, 3]

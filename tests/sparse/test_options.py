"""Each option against the same rule computed by hand in float64, and against what it means in one number."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import Parameter

from rowstep import SparseAdam
from tests.helpers.by_hand import AdamByHand
from tests.helpers.gradients import copy_of, rows_of, same_bits, step_with, table

pytestmark = pytest.mark.usefixtures("backend")

OPTIONS: list[dict[str, Any]] = [
    {},
    {"maximize": True},
    {"weight_decay": 0.1},
    {"weight_decay": 0.1, "maximize": True},
    {"weight_decay": 2.0, "decoupled_weight_decay": True},
    {"amsgrad": True},
    {"bias_correction": "row"},
    {"nonfinite": "skip"},
    {"weight_decay": 0.1, "amsgrad": True, "bias_correction": "row", "nonfinite": "skip", "maximize": True},
]


def trajectory(optimizer: SparseAdam, param: Parameter, hand: AdamByHand | None = None, steps: int = 25) -> None:
    """Step both with the same random gradients, whose size varies so that amsgrad's maximum is not the last."""
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        ids = torch.randint(len(param), (8,), generator=generator)
        values = torch.randn(8, param.shape[1], generator=generator, dtype=torch.float64) * (1 + 5 * (step % 4 == 0))
        step_with(optimizer, param, rows_of(param, ids, values))
        if hand is not None:
            hand.step(ids.tolist(), values)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_trajectory_is_the_one_computed_by_hand(options: dict[str, Any]) -> None:
    param = table(10, 3, dtype=torch.float64)
    hand = AdamByHand(param, lr=0.01, betas=(0.8, 0.95), eps=1e-4, **options)
    optimizer = SparseAdam([param], lr=0.01, betas=(0.8, 0.95), eps=1e-4, **options)
    trajectory(optimizer, param, hand)
    expected = {"exp_avg": hand.m, "exp_avg_sq": hand.v}
    if hand.amsgrad:
        expected["max_exp_avg_sq"] = hand.v_max
    for key, value in expected.items():
        torch.testing.assert_close(optimizer.state[param][key], torch.from_numpy(value), rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(param.detach(), torch.from_numpy(hand.p), rtol=1e-12, atol=1e-15)
    assert optimizer.state[param]["step"] == 25
    if hand.bias_correction == "row":
        assert optimizer.state[param]["row_step"].tolist() == hand.row_steps


@pytest.mark.parametrize(
    "options", [options for options in OPTIONS if options not in ({}, {"nonfinite": "skip"})], ids=str
)
def test_each_option_changes_the_result(options: dict[str, Any]) -> None:
    plain = table(10, 3, dtype=torch.float64)
    changed = copy_of(plain)
    trajectory(SparseAdam([plain]), plain)
    trajectory(SparseAdam([changed], **options), changed)
    assert not torch.allclose(plain, changed, rtol=1e-6, atol=1e-9)


def test_weight_decay_is_added_to_the_gradient() -> None:
    # With an explicit zero as gradient, only the decay acts: a first step moves by lr against the weight's sign.
    param = Parameter(torch.tensor([[5.0], [-3.0], [7.0]], dtype=torch.float64))
    step_with(SparseAdam([param], lr=0.1, eps=1e-12, weight_decay=0.01), param, rows_of(param, [0, 1], 0.0))
    assert param.flatten().tolist() == pytest.approx([4.9, -2.9, 7.0])


def test_decoupled_weight_decay_shrinks_the_weights() -> None:
    param = Parameter(torch.tensor([[5.0], [-3.0], [7.0]], dtype=torch.float64))
    optimizer = SparseAdam([param], lr=0.1, weight_decay=0.5, decoupled_weight_decay=True)
    step_with(optimizer, param, rows_of(param, [0, 1], 0.0))
    assert param.flatten().tolist() == pytest.approx([5.0 * 0.95, -3.0 * 0.95, 7.0])
    assert not optimizer.state[param]["exp_avg"].any()


@pytest.mark.parametrize("decoupled", [False, True])
def test_weight_decay_leaves_the_rows_alone_that_were_not_touched(decoupled: bool) -> None:
    param = table(6, 2)
    before = param.detach().clone()
    optimizer = SparseAdam([param], weight_decay=0.5, decoupled_weight_decay=decoupled)
    step_with(optimizer, param, rows_of(param, [4, 1]))
    touched = torch.tensor([1, 4])
    untouched = torch.tensor([0, 2, 3, 5])
    assert same_bits(param[untouched], before[untouched])
    assert (param[touched] != before[touched]).all()


def test_decoupled_weight_decay_without_weight_decay_does_nothing() -> None:
    plain = table(10, 3)
    asked = copy_of(plain)
    trajectory(SparseAdam([plain]), plain)
    trajectory(SparseAdam([asked], decoupled_weight_decay=True), asked)
    assert same_bits(plain, asked)


def test_amsgrad_keeps_the_largest_second_moment() -> None:
    param = Parameter(torch.zeros(2, 1, dtype=torch.float64))
    optimizer = SparseAdam([param], amsgrad=True, betas=(0.9, 0.5))
    step_with(optimizer, param, rows_of(param, [0], 4.0))
    step_with(optimizer, param, rows_of(param, [0], 0.0))
    state = optimizer.state[param]
    assert state["exp_avg_sq"].flatten().tolist() == [4.0, 0.0]
    assert state["max_exp_avg_sq"].flatten().tolist() == [8.0, 0.0]


def test_maximize_is_the_step_of_the_negative_gradient() -> None:
    up = table(10, 3)
    down = copy_of(up)
    grad = rows_of(up, [3, 5, 3])
    step_with(SparseAdam([up], maximize=True), up, grad)
    step_with(SparseAdam([down]), down, -grad)
    assert same_bits(up, down)


def test_a_row_first_seen_late_moves_by_lr_under_row_bias_correction() -> None:
    moved = {}
    for kind in ("global", "row"):
        param = Parameter(torch.zeros(2, 1, dtype=torch.float64))
        optimizer = SparseAdam([param], lr=0.1, eps=1e-12, bias_correction=kind)
        for _ in range(1000):
            step_with(optimizer, param, rows_of(param, [0], 1.0))
        step_with(optimizer, param, rows_of(param, [1], 1.0))
        moved[kind] = -param[1].item()
    assert moved["row"] == pytest.approx(0.1)
    assert moved["global"] == pytest.approx(0.1 * 2.514, rel=1e-3)


def test_row_steps_count_the_steps_of_each_row_and_not_its_occurrences() -> None:
    param = table(4, 2)
    optimizer = SparseAdam([param], bias_correction="row")
    for ids in ([0, 0, 0], [0, 2], [2, 2], [0]):
        step_with(optimizer, param, rows_of(param, ids))
    counts = optimizer.state[param]["row_step"]
    assert counts.dtype == torch.int64
    assert counts.tolist() == [3, 0, 2, 0]


def test_row_bias_correction_of_rows_touched_at_every_step_is_the_global_one() -> None:
    one = table(5, 2)
    other = copy_of(one)
    by_row, globally = SparseAdam([one], bias_correction="row"), SparseAdam([other])
    for _ in range(10):
        grad = rows_of(one, range(5))
        step_with(by_row, one, grad)
        step_with(globally, other, grad)
    torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_row_bias_correction_takes_dense_gradients_too() -> None:
    # A tied table: its gradient is sparse at first, then dense, where every row counts a step and eps is as in Adam.
    param = Parameter(torch.zeros(3, 1, dtype=torch.float64))
    optimizer = SparseAdam([param], lr=0.1, betas=(0.9, 0.99), eps=0.5, bias_correction="row")
    step_with(optimizer, param, rows_of(param, [1], 0.0))
    step_with(optimizer, param, torch.full_like(param, 2.0))
    assert optimizer.state[param]["row_step"].tolist() == [1, 2, 1]
    assert param[0].item() == pytest.approx(-0.1 * 2.0 / (2.0 + 0.5))
    m_hat, v_hat = 0.1 * 2.0 / (1 - 0.9**2), 0.01 * 4.0 / (1 - 0.99**2)
    assert param[1].item() == pytest.approx(-0.1 * m_hat / (v_hat**0.5 + 0.5))


def test_row_bias_correction_of_a_dense_gradient_alone_is_adam() -> None:
    ours = table(6, 3)
    theirs = copy_of(ours)
    optimizer, reference = SparseAdam([ours], bias_correction="row"), torch.optim.Adam([theirs])
    for _ in range(10):
        grad = torch.randn(6, 3)
        step_with(optimizer, ours, grad)
        step_with(reference, theirs, grad)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_options_of_a_group_hold_for_that_group_only() -> None:
    plain, decayed = table(4, 2), table(4, 2)
    alone = copy_of(plain), copy_of(decayed)
    groups: list[dict[str, Any]] = [{"params": [plain]}, {"params": [decayed], "weight_decay": 0.5, "maximize": True}]
    optimizer = SparseAdam(groups)
    for param, twin in zip((plain, decayed), alone, strict=True):
        param.grad = twin.grad = rows_of(param, [1, 2])
    optimizer.step()
    SparseAdam([alone[0]]).step()
    SparseAdam([alone[1]], weight_decay=0.5, maximize=True).step()
    assert same_bits(plain, alone[0])
    assert same_bits(decayed, alone[1])


@pytest.mark.parametrize(("name", "value"), [("nonfinite", "typo"), ("bias_correction", "rows")])
def test_an_option_edited_to_nonsense_is_refused_by_the_next_step(name: str, value: str) -> None:
    param = table(4, 2)
    optimizer = SparseAdam([param])
    optimizer.param_groups[0][name] = value
    param.grad = rows_of(param, [1])
    with pytest.raises(ValueError, match=f"Invalid {name}: '{value}' in group 0; expected "):
        optimizer.step()

"""nonfinite: what happens to a row whose summed gradient is not finite."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rowstep import SparseAdam
from tests.helpers.by_hand import AdamByHand
from tests.helpers.gradients import copy_of, rows_of, same_bits, step_with, table

pytestmark = pytest.mark.usefixtures("backend")

NONFINITE = [float("nan"), float("inf"), float("-inf")]


@pytest.mark.parametrize("bad", NONFINITE)
@pytest.mark.parametrize("bias_correction", ["global", "row"])
def test_skip_leaves_the_row_and_counts_it(bad: float, bias_correction: Any) -> None:
    param = table(6, 3, dtype=torch.float64)
    hand = AdamByHand(param, nonfinite="skip", bias_correction=bias_correction)
    optimizer = SparseAdam([param], nonfinite="skip", bias_correction=bias_correction)
    assert optimizer.skipped_rows == 0
    for step in range(4):
        values = torch.randn(5, 3, dtype=torch.float64)
        if step % 2:
            values[1, 2] = bad
        ids = [0, 3, 3, 5, 1]
        step_with(optimizer, param, rows_of(param, ids, values))
        hand.step(ids, values)
    torch.testing.assert_close(param.detach(), hand.p)
    torch.testing.assert_close(optimizer.state[param]["exp_avg_sq"], hand.v)
    assert optimizer.skipped_rows == hand.skipped == 2
    assert optimizer.state[param]["step"] == 4
    if bias_correction == "row":
        assert optimizer.state[param]["row_step"].tolist() == hand.row_steps


def test_skip_looks_at_the_sum_and_not_at_the_addends() -> None:
    # Each number is finite and their sum is not, so the row is skipped; the other row's infinities make a NaN.
    largest = torch.finfo(torch.float64).max
    param = table(4, 1, dtype=torch.float64)
    before = param.detach().clone()
    optimizer = SparseAdam([param], nonfinite="skip")
    values = torch.tensor([largest, 1.0, largest, torch.inf, -torch.inf], dtype=torch.float64)
    step_with(optimizer, param, rows_of(param, [0, 1, 0, 2, 2], values))
    assert (param != before).flatten().tolist() == [False, True, False, False]
    assert optimizer.skipped_rows == 2


def test_skip_with_force_sparse() -> None:
    param = table(3, 2, dtype=torch.float64)
    before = param.detach().clone()
    optimizer = SparseAdam([param], nonfinite="skip", force_sparse=True)
    step_with(optimizer, param, torch.tensor([[0.0, 0.0], [torch.nan, 0.0], [1.0, 0.0]], dtype=torch.float64))
    assert same_bits(param[:2], before[:2])
    assert optimizer.skipped_rows == 1


def test_a_dense_gradient_steps_as_torchs_whatever_is_in_it() -> None:
    """``nonfinite`` is an option of tables."""
    grad = torch.tensor([[1.0, torch.nan], [1.0, 1.0], [torch.inf, 1.0]])
    ours = table(3, 2)
    theirs = copy_of(ours)
    step_with(torch.optim.Adam([theirs], fused=True), theirs, grad)
    optimizer = SparseAdam([ours], nonfinite="skip")
    step_with(optimizer, ours, grad)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    assert optimizer.skipped_rows == 0

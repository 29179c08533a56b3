"""The counts of ``bias_correction="row"``: they begin with a table's first row step, with the history that it shows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rowstep import SparseAdam
from tests.helpers.gradients import Snapshot, rows_of, step_with, table

pytestmark = pytest.mark.usefixtures("backend")


@pytest.mark.parametrize("before", [0, 3])
def test_counts_begin_with_the_history_of_the_moments(before: int) -> None:
    param = table(4, 2)
    optimizer = SparseAdam([param], bias_correction="row")
    for _ in range(before):
        step_with(optimizer, param, torch.ones(4, 2))
    step_with(optimizer, param, rows_of(param, [1, 3, 3]))
    assert optimizer.state[param]["row_step"].tolist() == [before, before + 1, before, before + 1]


@pytest.mark.parametrize("options", [{"bias_correction": "row"}, {"second_moment": "row"}], ids=str)
@pytest.mark.parametrize("sparse_dim", [0, 2])
def test_a_row_is_one_of_the_first_dimension(options: dict[str, Any], sparse_dim: int) -> None:
    param = table(4, 2)
    optimizer = SparseAdam([param], **options)
    step_with(optimizer, param, rows_of(param, [1]))
    before = Snapshot(optimizer)
    optimizer.param_groups[0]["amsgrad"] = "bias_correction" in options
    with pytest.raises(
        ValueError, match=f"sparse_dim {sparse_dim}; expected 1, because something is kept for each row"
    ):
        step_with(optimizer, param, torch.eye(4, 2).to_sparse(sparse_dim) if sparse_dim else whole(param))
    before.assert_unchanged()


def whole(param: Tensor) -> Tensor:
    """A sparse gradient with sparse_dim 0, which names the whole parameter."""
    return torch.sparse_coo_tensor(
        torch.zeros(0, 1, dtype=torch.int64), torch.ones(1, *param.shape), param.shape, check_invariants=True
    )


def test_counts_written_from_outside_are_seen() -> None:
    """As a checkpoint does that is read into the state in place."""
    param = table(4, 2)
    optimizer = SparseAdam([param], bias_correction="row")
    step_with(optimizer, param, rows_of(param, [0]))
    optimizer.state[param]["row_step"].copy_(torch.tensor([5, 0, 1, 1]))
    step_with(optimizer, param, rows_of(param, [0, 1]))
    assert optimizer.state[param]["row_step"].tolist() == [6, 1, 1, 1]


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("change", ["grow", "reset"])
def test_a_row_that_begins_anew_moves_by_lr(change: str, dense: bool) -> None:
    """Also if none of the steps before was counted by rows."""
    param = table(2, 1, dtype=torch.float64)
    optimizer = SparseAdam([param], lr=0.1, bias_correction="row")
    for _ in range(100):
        step_with(optimizer, param, torch.ones_like(param) if dense else rows_of(param, [0, 1], 1.0))
    if change == "grow":
        optimizer.grow(param, 1)
    else:
        optimizer.reset_rows(param, torch.tensor([1]))
    before = param.detach().clone()
    step_with(optimizer, param, rows_of(param, range(len(param)), 1.0))
    torch.testing.assert_close(param.detach(), before - 0.1, rtol=0, atol=1e-6)
    assert optimizer.state[param]["row_step"].tolist() == ([101, 101, 1] if change == "grow" else [101, 1])

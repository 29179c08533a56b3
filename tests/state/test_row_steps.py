"""The slot for the counts of ``bias_correction="row"``: there from the first step on, blank until rows are counted."""

from __future__ import annotations

import pytest
import torch

import rowstep
from tests.helpers.gradients import rows_of, same_bits, step_with, table

pytestmark = pytest.mark.usefixtures("backend")


def test_dense_layers_have_a_slot_and_step_as_torchs() -> None:
    ours, torchs = table(8, 3), table(8, 3)
    torchs.data.copy_(ours.data)
    optimizer, adam = rowstep.SparseAdam([ours], bias_correction="row"), torch.optim.Adam([torchs], fused=True)
    optimizer.allocate_state()
    for step in range(4):
        grad = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))
        step_with(optimizer, ours, grad)
        step_with(adam, torchs, grad)
    assert same_bits(ours, torchs)
    assert optimizer.state[ours]["row_step"].tolist() == [0] * 8


@pytest.mark.parametrize("allocated", [False, True])
@pytest.mark.parametrize("first", ["dense", "empty", "nothing"])
def test_a_slot_without_counts_changes_nothing(allocated: bool, first: str) -> None:
    """Counts begin with the steps so far for rows that have history, whether there was a slot for them or not."""
    param = table(4, 2)
    optimizer = rowstep.SparseAdam([param], bias_correction="row")
    if allocated:
        optimizer.allocate_state()
    if first != "nothing":
        step_with(optimizer, param, torch.ones(4, 2) if first == "dense" else rows_of(param, []))
        assert optimizer.state[param]["row_step"].tolist() == [0] * 4
    step_with(optimizer, param, rows_of(param, [1, 3]))
    before = 1 if first == "dense" else 0
    assert optimizer.state[param]["row_step"].tolist() == [before, before + 1, before, before + 1]
    step_with(optimizer, param, torch.ones(4, 2))
    assert optimizer.state[param]["row_step"].tolist() == [before + 1, before + 2, before + 1, before + 2]


def test_a_slot_without_counts_takes_any_sparse_dim() -> None:
    param = table(4, 2)
    optimizer = rowstep.SparseAdam([param], bias_correction="row")
    optimizer.allocate_state()
    step_with(optimizer, param, torch.eye(4, 2).to_sparse())
    assert optimizer.state[param]["row_step"].tolist() == [[1, 0], [0, 1], [0, 0], [0, 0]]
    with pytest.raises(ValueError, match=r"counted rows over \(4, 2\)"):
        step_with(optimizer, param, rows_of(param, [1]))


def test_counts_written_from_outside_are_seen() -> None:
    """As a checkpoint does that is read into the state in place."""
    param = table(4, 2)
    optimizer = rowstep.SparseAdam([param], bias_correction="row")
    step_with(optimizer, param, torch.ones(4, 2))
    optimizer.state[param]["row_step"].copy_(torch.tensor([5, 0, 1, 1]))
    step_with(optimizer, param, torch.ones(4, 2))
    assert optimizer.state[param]["row_step"].tolist() == [6, 1, 2, 2]
    optimizer.reset_rows(param, torch.arange(4))
    step_with(optimizer, param, torch.ones(4, 2))
    assert optimizer.state[param]["row_step"].tolist() == [1] * 4
    optimizer.grow(param, 1)
    step_with(optimizer, param, rows_of(param, [0, 4]))
    assert optimizer.state[param]["row_step"].tolist() == [2, 1, 1, 1, 1]


def test_a_slot_made_in_inference_mode_counts() -> None:
    param = table(4, 2)
    optimizer = rowstep.SparseAdam([param], bias_correction="row")
    with torch.inference_mode():
        for _ in range(2):
            step_with(optimizer, param, rows_of(param, [1]))
    assert optimizer.state[param]["row_step"].tolist() == [0, 2, 0, 0]


def test_a_step_that_skips_all_of_its_rows_counts_none() -> None:
    """And what comes next is the same whether the state went through a file in between or not."""
    params = [table(4, 2), table(4, 2)]
    params[1].data.copy_(params[0].data)
    optimizers = [rowstep.SparseAdam([param], bias_correction="row", nonfinite="skip") for param in params]
    for optimizer, param in zip(optimizers, params, strict=True):
        step_with(optimizer, param, rows_of(param, [1, 3], float("inf")))
        assert optimizer.state[param]["row_step"].tolist() == [0] * 4
    optimizers[1].load_state_dict(optimizers[1].state_dict())
    for optimizer, param in zip(optimizers, params, strict=True):
        step_with(optimizer, param, torch.ones(4, 2))
    assert same_bits(params[0], params[1])


def test_rows_over_other_dimensions_are_refused_before_a_maximum_is_made() -> None:
    param = table(4, 2)
    optimizer = rowstep.SparseAdam([param], bias_correction="row")
    step_with(optimizer, param, rows_of(param, [1]))
    optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(ValueError, match=r"counted rows over \(4,\)"):
        step_with(optimizer, param, torch.eye(4, 2).to_sparse())
    assert "max_exp_avg_sq" not in optimizer.state[param]


@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize("change", ["grow", "reset", "reset all"])
def test_a_row_that_begins_anew_moves_by_lr(change: str, is_sparse: bool) -> None:
    """Whatever kind of gradient comes next, and also if none of the steps before was counted by rows."""
    param = table(2, 1, dtype=torch.float64)
    optimizer = rowstep.SparseAdam([param], lr=0.1, bias_correction="row")
    for _ in range(100):
        step_with(optimizer, param, torch.ones(2, 1, dtype=torch.float64))
    if change == "grow":
        optimizer.grow(param, 1)
    else:
        optimizer.reset_rows(param, torch.tensor([1, 0] if change == "reset all" else [1]))
    before = param.detach().clone()
    grad = rows_of(param, range(len(param)), 1.0) if is_sparse else torch.ones_like(param)
    step_with(optimizer, param, grad)
    torch.testing.assert_close(param.detach(), before - 0.1, rtol=0, atol=1e-6)  # a sparse step has eps elsewhere
    counts = {"grow": [101, 101, 1], "reset": [101, 1], "reset all": [1, 1]}[change]
    assert optimizer.state[param]["row_step"].tolist() == counts


def test_a_dense_gradient_after_an_empty_one_is_a_first_step() -> None:
    param = table(4, 2)
    before = param.detach().clone()
    optimizer = rowstep.SparseAdam([param], lr=0.1, bias_correction="row")
    step_with(optimizer, param, rows_of(param, []))
    step_with(optimizer, param, torch.ones(4, 2))
    torch.testing.assert_close(param.detach(), before - 0.1)

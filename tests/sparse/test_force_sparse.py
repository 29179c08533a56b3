"""force_sparse: of a dense gradient, only the rows that hold a non-zero count as touched."""

from __future__ import annotations

import pytest
import torch

from rowstep import SparseAdam
from tests.helpers.gradients import copy_of, rows_of, same_bits, step_with, table

pytestmark = pytest.mark.usefixtures("backend")


def test_rows_with_a_nonzero_step_as_under_sparse_adam_and_the_others_stay() -> None:
    ours = table(6, 3)
    theirs = copy_of(ours)
    before = ours.detach().clone()
    optimizer, reference = SparseAdam([ours], force_sparse=True), torch.optim.SparseAdam([theirs])
    for _ in range(10):
        dense = torch.zeros(6, 3)
        dense[1], dense[4, 2] = torch.randn(3), 1.5
        step_with(optimizer, ours, dense)
        step_with(reference, theirs, rows_of(theirs, [1, 4], dense[[1, 4]]))
    assert same_bits(ours[[0, 2, 3, 5]], before[[0, 2, 3, 5]])
    assert same_bits(optimizer.state[ours]["exp_avg"], reference.state[theirs]["exp_avg"])
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_without_it_old_momentum_moves_the_rows_that_are_zero() -> None:
    still, moving = table(3, 2), table(3, 2)
    first, then = torch.ones(3, 2), torch.tensor([[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]])
    for param, force_sparse in ((still, True), (moving, False)):
        optimizer = SparseAdam([param], force_sparse=force_sparse)
        step_with(optimizer, param, first)
        between = param.detach().clone()
        step_with(optimizer, param, then)
        assert same_bits(param[0], between[0]) == force_sparse


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_a_gradient_of_zeros_counts_a_step_and_changes_nothing(zero: float) -> None:
    param = table(3, 2)
    before = param.detach().clone()
    optimizer = SparseAdam([param], force_sparse=True)
    step_with(optimizer, param, torch.full((3, 2), zero))
    assert same_bits(param, before)
    assert optimizer.state[param]["step"] == 1

"""The counts of ``bias_correction="row"``: they begin with a table's first row step, with the history that it shows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rowstep import SparseAdam
from tests.helpers.gradients import Snapshot, rows_of, step_with, table

pytestmark = pytest.mark.usefixtures("backend")


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

"""Options that a program sets between steps: honoured, or refused by the next step before anything has changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rowstep import DeferredAdam, SparseAdam
from tests.helpers.gradients import Snapshot, rows_of, table

BAD: list[tuple[str, Any]] = [
    ("betas", (1.0, 0.999)),
    ("betas", [0.9, 1.0]),
    ("eps", -1.0),
    ("weight_decay", torch.tensor(-0.1)),
    ("lr", "x"),
    ("lr", torch.ones(2)),
    ("amsgrad", "x"),
]


@pytest.mark.parametrize("optimizer", [SparseAdam, DeferredAdam])
@pytest.mark.parametrize(("name", "value"), BAD, ids=str)
def test_an_option_that_cannot_be_is_refused_with_nothing_changed(optimizer: Any, name: str, value: Any) -> None:
    params = [table(4, 3), table(4, 3)]
    made = optimizer([{"params": [param]} for param in params])
    for param in params:
        param.grad = rows_of(param, [1])
    made.step()
    good = made.param_groups[1][name]
    before = Snapshot(made)
    made.param_groups[1][name] = value
    with pytest.raises(ValueError, match=r"in group 1(; expected|, but has 2)"):
        made.step()
    del made.param_groups[1][name]
    with pytest.raises(ValueError, match=f"'{name}' is missing in group 1; expected"):
        made.step()
    before.assert_unchanged()
    made.param_groups[1][name] = good
    made.step()


@pytest.mark.parametrize("value", [-0.1, float("inf"), torch.tensor(-0.1)], ids=str)
def test_a_negative_lr_is_refused_where_rows_wait(value: Any) -> None:
    param = table(4, 3)
    optimizer = DeferredAdam([param])
    optimizer.param_groups[0]["lr"] = value
    param.grad = rows_of(param, [1])
    with pytest.raises(ValueError, match=r"Invalid learning rate: .* in group 0; expected a finite number >= 0"):
        optimizer.step()

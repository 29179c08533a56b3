"""Options that a program sets between steps: honoured, or refused by the next step before anything has changed."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
import torch

from rowstep import DeferredAdam, SparseAdam
from tests.helpers.gradients import Snapshot, rows_of, table

pytestmark = pytest.mark.usefixtures("backend")

OPTIMIZERS: list[Any] = [SparseAdam, DeferredAdam]
BAD: list[tuple[str, Any]] = [
    *(("betas", value) for value in [(1.0, 0.999), (0.9, -0.1), None, 0.9, (0.9,), ("a", "b"), [0.9, 1.0]]),
    *(("eps", value) for value in [None, -1.0, float("nan"), "x", torch.ones(2)]),
    *(("weight_decay", value) for value in [None, -1.0, "x", torch.tensor(-0.1), torch.ones(2)]),
    *(("lr", value) for value in [None, "x", 1j, Decimal("0.1"), Fraction(1, 10), torch.ones(2)]),
    *((name, "x") for name in ("maximize", "amsgrad", "decoupled_weight_decay")),
]


def two_groups(optimizer: Any) -> Any:
    """An optimizer that has taken a step, with gradients for the next."""
    params = [table(4, 3), table(4, 3)]
    made = optimizer([{"params": [param]} for param in params])
    for _ in range(2):
        for param in params:
            param.grad = rows_of(param, [1])
        if not made.state:
            made.step()
    return made


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("name", "value"), BAD, ids=str)
def test_an_option_that_cannot_be_is_refused_with_nothing_changed(optimizer: Any, name: str, value: Any) -> None:
    made = two_groups(optimizer)
    good = made.param_groups[1][name]
    made.param_groups[1][name] = value
    before = Snapshot(made)
    with pytest.raises(ValueError, match=r"in group 1; expected|Tensor lr must be 1-element in group 1"):
        made.step()
    before.assert_unchanged()
    made.param_groups[1][name] = good
    made.step()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["lr", "betas", "eps", "weight_decay", "amsgrad", "maximize"])
def test_an_option_that_is_missing_is_named(optimizer: Any, name: str) -> None:
    made = two_groups(optimizer)
    del made.param_groups[1][name]
    before = Snapshot(made)
    with pytest.raises(ValueError, match=f"'{name}' is missing in group 1; expected"):
        made.step()
    before.assert_unchanged()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_betas_that_change_in_place_are_looked_at_every_time(optimizer: Any) -> None:
    made = two_groups(optimizer)
    for betas in ([0.9, 0.999], (torch.tensor(0.9), torch.tensor(0.999))):
        made.param_groups[1]["betas"] = betas
        made.step()
        if isinstance(betas, list):
            betas[0] = 1.0
        else:
            betas[0].fill_(1.0)
        with pytest.raises(ValueError, match=r"Invalid beta parameter at index 0: 1\.0 in group 1"):
            made.step()


def test_a_negative_lr_is_torchs_for_sparse_adam_and_refused_where_rows_wait() -> None:
    made = two_groups(SparseAdam)
    made.param_groups[1]["lr"] = -0.1
    before = made.param_groups[1]["params"][0].detach().clone()
    made.step()
    assert not torch.equal(made.param_groups[1]["params"][0], before)
    for value in (-0.1, float("inf"), float("nan"), torch.tensor(-0.1)):
        made = two_groups(DeferredAdam)
        made.param_groups[1]["lr"] = value
        unchanged = Snapshot(made)
        with pytest.raises(ValueError, match=r"Invalid learning rate: .* in group 1; expected a finite number >= 0"):
            made.step()
        unchanged.assert_unchanged()

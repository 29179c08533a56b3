"""What programs do around tables with small state: edits, huge numbers, parameters listed twice, inference mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rowstep import DeferredAdam, SparseAdam
from tests.helpers.gradients import rows_of

pytestmark = pytest.mark.usefixtures("backend")


def stepped(optimizer: Any, param: nn.Parameter, ids: list[int], values: Tensor | float = 1.0) -> None:
    if isinstance(optimizer, DeferredAdam):
        optimizer.catch_up(param, torch.tensor(ids))
    param.grad = rows_of(param, ids, values)
    optimizer.step()


def factored(kind: Any, rows: int = 6, **options: Any) -> tuple[Any, nn.Parameter]:
    param = nn.Parameter(torch.ones(rows, 4))
    optimizer = kind([param], second_moment="factored", betas=(0.0, 0.9), **options)
    stepped(optimizer, param, [0, 1])
    return optimizer, param


@pytest.mark.parametrize("kind", [SparseAdam, DeferredAdam])
@pytest.mark.parametrize("edit", ["resized", "too long", "whole numbers", "expanded"])
def test_columns_that_somebody_has_edited_are_refused(kind: Any, edit: str) -> None:
    optimizer, param = factored(kind)
    state, before = optimizer.state[param], param.detach().clone()
    if edit == "resized":
        state["exp_avg_sq_column"].untyped_storage().resize_(0)
    elif edit == "too long":
        state["exp_avg_sq_column"] = torch.ones(5)
    elif edit == "whole numbers":
        state["exp_avg_sq_column"] = torch.ones(4, dtype=torch.int64)
    else:
        state["exp_avg_sq_column"] = torch.ones(1).expand(4)
    with pytest.raises(ValueError, match="parameter 0 of group 0: its state 'exp_avg_sq_column' is"):
        stepped(optimizer, param, [0, 1])
    assert torch.equal(param.detach(), before)


def test_the_sum_of_rows_recovers_from_one_huge_gradient() -> None:
    """It is kept by what is added and taken away, and the digits that a huge number has pushed out are gone."""
    for seed in range(2):
        torch.manual_seed(seed)
        optimizer, param = factored(SparseAdam, rows=10, lr=1e-3)
        for step in range(1200):
            scale = 1e9 if step == 5 else 1e-2
            stepped(optimizer, param, torch.randperm(10)[:5].tolist(), torch.randn(5, 4) * scale)
        state = optimizer.state[param]
        assert float(state["exp_avg_sq_sum"]) == pytest.approx(float(state["exp_avg_sq_row"].double().sum()), rel=1e-6)


@pytest.mark.parametrize("kind", [SparseAdam, DeferredAdam])
def test_a_parameter_that_is_listed_twice_takes_two_steps_in_all_of_its_state(kind: Any) -> None:
    param = nn.Parameter(torch.ones(6, 4))
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = kind([param, param], second_moment="factored", betas=(0.0, 0.9))
    stepped(optimizer, param, [0, 1])
    ((_, state),) = optimizer.state_dict()["state"].items()
    assert int(state["step"]) == 2
    torch.testing.assert_close(state["exp_avg_sq_column"], torch.full((4,), 0.19))
    assert float(state["exp_avg_sq_sum"]) == pytest.approx(0.38)


@pytest.mark.parametrize("kind", [SparseAdam, DeferredAdam])
def test_a_dense_gradient_of_a_table_in_16_bits_is_rounded_at_random_too(kind: Any) -> None:
    param = nn.Parameter(torch.zeros(200, 4))
    optimizer = kind([param], betas=(0.0, 0.999), state_dtype=torch.bfloat16)
    stepped(optimizer, param, list(range(200)))
    for _ in range(499):
        param.grad = torch.ones_like(param) + 0 * param.detach()
        optimizer.step()
    second = optimizer.state_dict()["state"][0]["exp_avg_sq"]
    assert second.dtype == torch.bfloat16
    assert float(second.double().mean()) == pytest.approx(1 - 0.999**500, rel=0.01)


@pytest.mark.parametrize("kind", [SparseAdam, DeferredAdam])
def test_a_row_that_overflows_does_not_throw_others_about(kind: Any) -> None:
    optimizer, param = factored(kind)
    values = torch.ones(1, 4)
    values[0, 1] = 1e25
    stepped(optimizer, param, [0], values)
    before = param.detach()[1:].clone()
    stepped(optimizer, param, [1, 2])
    moved = (param.detach()[1:] - before)[:, [0, 2, 3]]
    assert moved.abs().max() < 0.01


@pytest.mark.parametrize("kind", [SparseAdam, DeferredAdam])
@pytest.mark.parametrize("second", ["element", "row", "factored"])
def test_a_state_that_was_loaded_in_inference_mode_can_be_stepped(kind: Any, second: str) -> None:
    param = nn.Parameter(torch.ones(6, 4))
    optimizer = kind([param], second_moment=second, betas=(0.0, 0.9))
    stepped(optimizer, param, [0, 1])
    with torch.inference_mode():
        saved = {
            number: {key: torch.as_tensor(slot).clone() for key, slot in state.items()}
            for number, state in optimizer.state_dict()["state"].items()
        }
        other = kind([param], second_moment=second, betas=(0.0, 0.9))
        other.load_state_dict(optimizer.state_dict() | {"state": saved})
    stepped(other, param, [0, 1])
    assert int(other.state_dict()["state"][0]["step"]) == 2


def test_steps_without_a_row_leave_the_columns_of_sparse_adam_alone() -> None:
    optimizer, param = factored(SparseAdam, nonfinite="skip")
    before = optimizer.state[param]["exp_avg_sq_column"].clone()
    stepped(optimizer, param, [])
    stepped(optimizer, param, [3], torch.inf)
    assert torch.equal(optimizer.state[param]["exp_avg_sq_column"], before)
    assert optimizer.skipped_rows == 1

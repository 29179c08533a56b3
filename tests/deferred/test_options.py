"""Options in groups, schedulers, options that change in the middle of a run, and what is refused with which words."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rowstep import DeferredAdam, DeferredAdamW
from tests.helpers.deferred_cases import Twins, distance, embedding, optimizers, with_dense_gradients, zipf
from tests.helpers.gradients import table

pytestmark = pytest.mark.usefixtures("backend")


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_tensor_as_lr(shape: tuple[int, ...]) -> None:
    lr = torch.full(shape, 0.01, dtype=torch.float64)
    twins = Twins(embedding(), lr=lr, weight_decay=0.1)
    for step in range(40):
        if step % 10 == 9:
            lr.mul_(0.5)
        twins.look_up(*zipf(40, 4).tolist())
    assert twins.ours.param_groups[0]["lr"] is lr
    twins.assert_same()


def test_a_float32_tensor_as_lr() -> None:
    """torch computes 1 - lr * weight_decay and the step size in the dtype of the tensor, for every row."""
    model = embedding()
    twin, lr = with_dense_gradients(model), torch.tensor(0.01)
    ours, theirs = optimizers(model, twin, lr=lr, weight_decay=0.1)
    for _ in range(30):
        batch, goal = zipf(40, 4), torch.randn(4, 3, dtype=torch.float64)
        for one, optimizer in ((model, ours), (twin, theirs)):
            optimizer.zero_grad()
            (one(batch) - goal).square().sum().backward()
            optimizer.step()
    ours.flush()
    assert distance(model.weight, twin.weight) <= 30 * 0.01 * 1.2e-7


@pytest.mark.parametrize(
    "change",
    [
        {"betas": (0.5, 0.99)},
        {"betas": (0.0, 1e-9)},
        {"maximize": True},
        {"betas": (0.95, 0.999), "eps": 1e-6, "lr": 0.02, "weight_decay": 1.0},
    ],
    ids=str,
)
def test_options_that_change_in_the_middle_of_a_run(change: dict[str, Any]) -> None:
    twins = Twins(embedding())
    twins.run(20, rows=40)
    before = {key: twins.ours.param_groups[0][key] for key in change}
    twins.set(**change)
    twins.run(20, rows=40)
    twins.set(**before)
    twins.run(20, rows=40)
    twins.assert_same()


REFUSED: list[tuple[type[DeferredAdam], dict[str, Any], str]] = [
    (DeferredAdam, {"betas": (0.95, 0.9)}, r"Invalid betas: \(0.95, 0.9\).*beta1 < sqrt\(beta2\).*torch\.optim\.Adam"),
    (DeferredAdamW, {"betas": (0.9999, 0.99999)}, r"would act for \d+ steps"),
    (DeferredAdamW, {"lr": 1.0, "weight_decay": 1.0}, r"lr \* weight_decay is 1.0.*expected less than 1"),
    (DeferredAdam, {"weight_decay": 0.1}, "expected 0, because L2 added to the gradient cannot .*Use DeferredAdamW"),
    (DeferredAdam, {"lr": -1.0}, "Invalid learning rate: -1.0"),
]


@pytest.mark.parametrize(("cls", "options", "message"), REFUSED)
def test_options_that_cannot_be_deferred_are_refused(
    cls: type[DeferredAdam], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        cls([table(2, 2)], **options)
    groups = [{"params": [table(2, 2)]}, {"params": [table(2, 2)]} | options]
    with pytest.raises(ValueError, match=message) as caught:
        cls(groups)
    assert "group 1" in str(caught.value)
    optimizer = cls(groups[:1])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group(groups[1])
    assert len(optimizer.param_groups) == 1

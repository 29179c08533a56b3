"""An lr that is a tensor, options and loaded states that cannot be deferred, and a state that can."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from rowstep import DeferredAdam, DeferredAdamW, SparseAdam
from tests.helpers.copies import through_a_file
from tests.helpers.deferred_cases import Twins, distance, embedding, optimizers, waiting, with_dense_gradients, zipf
from tests.helpers.gradients import Snapshot, rows_of, step_with, table

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


@pytest.mark.parametrize(("name", "factor"), [("max_exp_avg_sq", 0.0), ("max_exp_avg_sq", 0.5), ("exp_avg_sq", 4.0)])
def test_moments_that_are_written_to_raise_the_maximum_of_amsgrad(name: str, factor: float) -> None:
    """As torch does at its next step, also of rows without a gradient."""
    twins = waiting(lr=0.01, amsgrad=True)
    twins.each(lambda model, optimizer: optimizer.state[model.weight][name].mul_(factor))
    twins.run(5, rows=20)
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


REFUSED: list[tuple[type[DeferredAdam], dict[str, Any], str]] = [
    (DeferredAdam, {"betas": (0.95, 0.9)}, r"Invalid betas: \(0.95, 0.9\).*beta1 < sqrt\(beta2\).*torch\.optim\.Adam"),
    (DeferredAdamW, {"betas": (0.9999, 0.99999)}, r"would act for \d+ steps"),
    (DeferredAdamW, {"lr": 1.0, "weight_decay": 1.0}, r"lr \* weight_decay is 1.0.*expected less than 1"),
    (DeferredAdam, {"lr": -1.0}, "Invalid learning rate: -1.0"),
    (DeferredAdamW, {"eps": 0.0}, "Invalid epsilon value: 0.0"),
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


def test_a_state_that_cannot_be_deferred_is_refused_and_nothing_has_changed() -> None:
    twins = Twins(embedding(), lr=0.01)
    twins.run(16, rows=40)
    twins.ours.flush()
    before = Snapshot(twins.ours)
    adam = torch.optim.Adam(twins.twin.parameters(), betas=(0.99, 0.9))
    with pytest.raises(ValueError, match=r"Invalid betas: \(0.99, 0.9\) in group 0 of the loaded state"):
        twins.ours.load_state_dict(adam.state_dict())
    before.assert_unchanged()
    twins.run(5, rows=40)
    twins.assert_same()


def test_a_state_of_sparse_adam_goes_on() -> None:
    param = table(6, 2)
    first = SparseAdam([param])
    step_with(first, param, rows_of(param, [1, 2]))
    second = DeferredAdam([param])
    second.load_state_dict(through_a_file(first.state_dict()))
    second.catch_up(param, torch.tensor([2, 3]))
    step_with(second, param, rows_of(param, [2, 3]))
    assert second.state[param]["step"] == 2
    second.flush()


COUPLED = r"weight_decay=0.1 adds L2 .*expected 0.*weight_decay=0 .*DeferredAdamW.*SparseAdam\(weight_decay=0.1\)"


@pytest.mark.parametrize("options", [{}, {"lr": 0.5, "weight_decay": 3.0}, {"foreach": True, "amsgrad": True}], ids=str)
def test_layers_may_have_l2_beside_tables_without(options: dict[str, Any]) -> None:
    model: Any = nn.Sequential(embedding(), nn.Linear(3, 2, dtype=torch.float64))
    twin, made = with_dense_gradients(model), []
    for each, kind in ((model, DeferredAdam), (twin, torch.optim.Adam)):
        groups = [{"params": each[0].parameters()}, {"params": each[1].parameters(), "weight_decay": 0.1} | options]
        made.append(kind(groups))
    for _ in range(20):
        batch = zipf(40, 4)
        for each, optimizer in zip((model, twin), made, strict=True):
            optimizer.zero_grad()
            each(batch).square().sum().backward()
            optimizer.step()
    assert distance(model[0].weight, twin[0].weight) <= 1e-12
    assert distance(model[1].weight, twin[1].weight) <= 1e-12


def test_l2_is_refused_when_it_meets_a_sparse_gradient_and_nothing_has_changed() -> None:
    model: Any = nn.Sequential(embedding(), nn.Linear(3, 2, dtype=torch.float64))
    refused, made = (
        DeferredAdam([{"params": [(name, getattr(model, key).weight)]} for name, key in (("top", "1"), ("emb", "0"))])
        for _ in range(2)
    )
    for _ in range(2):  # with rows that wait for the second
        made.zero_grad()
        model(zipf(40, 4)).sum().backward()
        made.step()
    model(zipf(40, 4)).sum().backward()
    version, counts = model[0].weight._version, [int(state["step"]) for state in made.state.values()]
    for optimizer in (made, refused):  # the second brings up to date what waits for the first
        optimizer.param_groups[1]["weight_decay"] = 0.1
        with pytest.raises(ValueError, match=rf"^parameter 0 of group 1 \('emb'\): {COUPLED}"):
            optimizer.step()
    assert not refused.state
    assert counts == [int(state["step"]) for state in made.state.values()] == [2, 2]
    assert model[0].weight._version == version
    made.param_groups[1]["weight_decay"] = 0.0
    made.step()


def test_a_dense_gradient_of_a_table_that_has_waited_takes_l2() -> None:
    twins = waiting(lr=0.01)
    twins.set(weight_decay=0.1)
    for _ in range(3):
        twins.step(lambda model: model.weight)
    twins.assert_same()

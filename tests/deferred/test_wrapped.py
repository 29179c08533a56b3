"""Models with rows that wait that are scripted, parametrized, normalised, converted, or hold their own optimizer."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from rowstep import StaleRowsError
from tests.helpers.copies import objects_through_a_file, pickled
from tests.helpers.deferred_cases import BAR, Twins, distance, embedding, in_memory, reading, zipf

pytestmark = pytest.mark.usefixtures("backend")

IDS = torch.tensor([1, 2, 30])


def network(table: nn.Module | None = None) -> nn.Sequential:
    return nn.Sequential(embedding() if table is None else table, nn.Linear(3, 2, dtype=torch.float64))


def waiting(model: nn.Module) -> Twins:
    """Twins in the middle of a run, with rows that wait."""
    twins = Twins(model)
    begin(twins)
    return twins


def begin(twins: Twins) -> None:
    twins.step(reading(torch.arange(40)))
    train(twins)


def train(twins: Twins, steps: int = 5) -> None:
    for _ in range(steps):
        twins.step(reading(zipf(20, 4)))


# Scripts, traces and graphs


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # torch.jit's own
def test_a_scripted_model() -> None:
    twins = waiting(network())
    twins.ours.flush()  # a script has the weights as they lie in memory
    scripted: Any = torch.jit.script(twins.model)
    assert distance(scripted(torch.arange(40)), twins.twin(torch.arange(40))) <= BAR
    train(twins)
    twins.ours.zero_grad()
    scripted(torch.tensor([39])).sum().backward()
    with pytest.raises(StaleRowsError, match="a scripted module"):
        twins.ours.step()
    train(twins)
    twins.assert_same()


def traced_by_torch(model: nn.Module, **options: Any) -> Any:
    return torch.jit.trace(model, (IDS,), **options)  # type: ignore[no-untyped-call]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("gone", [False, True])
def test_a_traced_model(gone: bool) -> None:
    twins = waiting(network())
    if gone:
        del twins.ours
        gc.collect()
    twins.model.eval()
    traced = traced_by_torch(twins.model)
    assert distance(traced(IDS + 5), twins.twin(IDS + 5)) <= BAR
    assert "aten::embedding" in str(traced.inlined_graph)
    assert str(traced.inlined_graph).count("aten::index") == 0  # what brings rows up to date is no part of the model
    if not gone:
        twins.model.train()
        train(twins)
        twins.assert_same()


# Parametrizations


class Doubled(nn.Module):
    """A parametrization whose gradient stays sparse."""

    def forward(self, table: Tensor) -> Tensor:
        return 2 * table


def assert_alike_through_a_parametrization(twins: Twins) -> None:
    """Whether the table is saved, looked up, read, or copied, after steps each time."""
    whole = torch.arange(40)
    train(twins)
    one, other = twins.model.state_dict(), twins.twin.state_dict()
    assert one.keys() == other.keys()
    assert all(distance(one[key], other[key]) <= BAR for key in one)
    train(twins)
    assert distance(twins.model(whole), twins.twin(whole)) <= BAR
    train(twins)
    assert distance(twins.model.weight, twins.twin.weight) <= BAR
    train(twins)
    assert distance(copy.deepcopy(twins.model).weight, twins.twin.weight) <= BAR


def test_a_table_that_is_parametrized_while_rows_wait() -> None:
    twins = waiting(embedding())
    twins.each(lambda model, _: parametrize.register_parametrization(model, "weight", Doubled()))
    assert_alike_through_a_parametrization(twins)
    twins.each(lambda model, _: parametrize.remove_parametrizations(model, "weight", leave_parametrized=True))
    assert type(copy.deepcopy(twins.model)) is nn.Embedding
    train(twins)
    twins.assert_same()


# A module that holds its optimizer


WAYS = [copy.deepcopy, pickled, objects_through_a_file]


def assert_both_go_on(twins: Twins, model: Any, optimizer: Any) -> None:
    """The copy and the original train as dense Adam does, each by itself."""
    assert model is not twins.model
    assert optimizer is not twins.ours
    other = copy.copy(twins)
    other.model, other.ours = model, optimizer
    other.twin, other.theirs = copy.deepcopy((twins.twin, twins.theirs))
    for both in (other, twins, other):
        train(both)
        assert distance(in_memory(both.model.weight), both.twin.weight) > BAR  # rows wait
        both.model.eval()
        assert distance(both.model.weight, both.twin.weight) <= BAR
        both.model.train()
        train(both)
        both.assert_same()


@pytest.mark.parametrize("copied", WAYS)
def test_a_module_that_holds_its_optimizer(copied: Callable[[Any], Any]) -> None:
    twins = waiting(embedding())
    twins.model.opt = twins.ours
    model = copied(twins.model)
    assert model.opt.param_groups[0]["params"][0] is model.weight
    assert_both_go_on(twins, model, model.opt)


# What else is done to modules


def test_weights_that_are_assigned() -> None:
    twins = waiting(embedding())
    old = twins.model.weight
    twins.model.load_state_dict({"weight": torch.zeros(40, 3, dtype=torch.float64)}, assign=True)
    assert distance(old, twins.twin.weight) <= BAR
    assert not twins.model(IDS).any()


def test_a_table_in_shared_memory() -> None:
    twins = waiting(network())
    twins.each(lambda model, optimizer: optimizer.zero_grad())  # a sparse gradient cannot be shared
    twins.each(lambda model, _: model.share_memory())
    assert distance(twins.model[0].weight, twins.twin[0].weight) <= BAR
    train(twins)
    twins.assert_same()

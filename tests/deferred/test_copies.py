"""Whoever takes a whole table sees it flushed, without asking: state dicts, eval, copies, pickles, other optimizers."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rowstep import DeferredAdam, DeferredAdamW
from tests.helpers.copies import objects_through_a_file, pickled
from tests.helpers.deferred_cases import BAR, Twins, bag, distance, embedding, in_memory, waiting, zipf

pytestmark = pytest.mark.usefixtures("backend")


class Model(nn.Module):
    """Two tables in a model, one of them in a nested module, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.users = embedding()
        self.items = nn.Sequential(bag(mode="sum"))
        self.out = nn.Linear(3, 2, dtype=torch.float64)

    def forward(self, ids: Tensor) -> Any:
        return self.out(self.users(ids) * self.items(ids.unsqueeze(1)))


def trained() -> Twins:
    """Twins in the middle of a run, with rows that wait."""
    twins = waiting(Model())
    assert distance(in_memory(twins.model.users.weight), twins.twin.users.weight) > BAR
    return twins


def assert_same_weights(model: nn.Module, twin: nn.Module) -> None:
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert distance(one, other) <= BAR


def test_the_optimizers_state_dict_is_flushed_and_so_are_the_weights() -> None:
    twins = trained()
    state, expected = twins.ours.state_dict()["state"], twins.theirs.state_dict()["state"]
    assert state.keys() == expected.keys()
    for number, moments in expected.items():
        assert state[number].keys() == moments.keys()
        for key, value in moments.items():
            assert state[number][key].dtype == value.dtype
            assert distance(state[number][key], value) <= BAR
    assert_same_weights(twins.model, twins.twin)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled, objects_through_a_file])
def test_a_copy_of_the_model_is_flushed_and_plain(copied: Callable[[Any], Any]) -> None:
    twins = trained()
    twins.model.users.register_forward_pre_hook(note_call)
    twins.model.users.mine = "kept"
    twin = copied(twins.model)
    assert_same_weights(twin, twins.twin)
    assert type(twin.users) is nn.Embedding
    assert type(twin.items[0]) is nn.EmbeddingBag
    for param in twin.parameters():
        assert type(param) is nn.Parameter
        assert not vars(param)
    assert twin.users.mine == "kept"
    assert len(twin.users._forward_pre_hooks) == 1
    # The copy is nobody's: training goes on without it.
    before = twin.users.weight.detach().clone()
    twins.run(5, rows=40)
    assert torch.equal(twin.users.weight, before)
    twin(torch.tensor([1, 2, 3]))
    twins.assert_same()


def note_call(module: nn.Module, args: Any) -> None:
    """A hook of the user's own, which a copy keeps."""


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_the_optimizer_may_come_first(copied: Callable[[Any], Any]) -> None:
    twins = trained()
    twins.ours, twins.model = copied((twins.ours, twins.model))
    twins.run(10, rows=40)
    twins.assert_same()


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled, objects_through_a_file])
def test_a_copy_of_the_optimizer_alone(copied: Callable[[Any], Any]) -> None:
    twins = trained()
    optimizer = copied(twins.ours)
    params = optimizer.param_groups[0]["params"]
    for one, other in zip(params, twins.twin.parameters(), strict=True):
        assert distance(one, other) <= BAR
        assert optimizer.state[one]["step"] == 11
    assert optimizer.allow_stale == twins.ours.allow_stale
    assert optimizer.param_groups[0]["weight_decay"] == 0.1
    twins.run(5, rows=40)
    twins.assert_same()


def test_a_pickled_model_needs_no_rowstep_to_be_loaded() -> None:
    assert b"rowstep" not in pickle.dumps(trained().model.users)


def test_weights_that_are_loaded_while_rows_wait() -> None:
    """What a row still had to do belongs to the old weights."""
    twins = trained()
    other = Model().state_dict()
    twins.each(lambda model, optimizer: model.load_state_dict(other))
    assert_same_weights(twins.model, twins.twin)
    twins.run(15, rows=40)
    twins.assert_same()


def test_a_model_outlives_its_optimizer() -> None:
    """A run ends and only the model is kept: it is the model that dense Adam leaves, also where rows waited."""
    twins = trained()
    del twins.ours
    gc.collect()
    twins.model(torch.tensor([1, 2, 3]))
    assert_same_weights(copy.deepcopy(twins.model), twins.twin)
    state = twins.model.state_dict()
    assert distance(state["users.weight"], twins.twin.users.weight) <= BAR
    assert type(copy.deepcopy(twins.model).users) is nn.Embedding


def test_a_second_optimizer_of_torchs_takes_over() -> None:
    twins = trained()
    for module in (twins.model.users, twins.model.items[0]):
        module.sparse = False
    new = torch.optim.Adam(twins.model.parameters())
    twins.theirs = torch.optim.Adam(twins.twin.parameters())
    for _ in range(5):
        ids = zipf(40, 6)
        for model, optimizer in ((twins.model, new), (twins.twin, twins.theirs)):
            optimizer.zero_grad()
            model(ids).square().sum().backward()
            optimizer.step()
    assert_same_weights(twins.model, twins.twin)


@pytest.mark.parametrize("make", [DeferredAdam, DeferredAdamW])
@pytest.mark.parametrize(
    "options",
    [{}, {"second_moment": "row"}, {"state_dtype": torch.bfloat16}, {"dtype": torch.float64, "amsgrad": True}],
    ids=str,
)
def test_a_resumed_run_has_the_bits_of_one_that_saved_and_went_on(make: Any, options: dict[str, Any]) -> None:
    """Also of rows that catch up in turn, or have waited for longer than a row's momentum acts."""
    rows, saved_at, dtype = 20_000, 30, options.get("dtype", torch.float32)
    options = {name: value for name, value in options.items() if name != "dtype"}

    def begin() -> tuple[Any, Any]:
        model = embedding(rows, 2, dtype=dtype)
        return model, make(model.parameters(), betas=(0.3, 0.9), **options)

    def train(model: Any, optimizer: Any, steps: range) -> None:
        for step in steps:
            torch.manual_seed(step)
            optimizer.param_groups[0]["lr"] = 0.01 * (1 + step % 7)
            optimizer.zero_grad()
            model(torch.randint(rows, (500,))).square().sum().backward()
            optimizer.step()

    one, other = begin(), begin()
    train(*one, range(saved_at))
    for new, old in zip(other, pickled([part.state_dict() for part in one]), strict=True):
        new.load_state_dict(old)
    for model, optimizer in (one, other):
        train(model, optimizer, range(saved_at, 100))
        optimizer.flush()
    assert torch.equal(one[0].weight, other[0].weight)
    for name, slot in one[1].state[one[0].weight].items():
        assert torch.equal(slot, other[1].state[other[0].weight][name]), name

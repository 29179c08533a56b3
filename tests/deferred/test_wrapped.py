"""Models with rows that wait that are scripted, parametrized, normalised, converted, or hold their own optimizer."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from rowstep import DeferredAdam, StaleRowsError
from tests.helpers.deferred_cases import (
    BAR,
    Twins,
    distance,
    embedding,
    in_memory,
    optimizers,
    reading,
    with_dense_gradients,
    zipf,
)

pytestmark = pytest.mark.usefixtures("backend")

IDS = torch.tensor([1, 2, 30])


def network(table: nn.Module | None = None) -> nn.Sequential:
    return nn.Sequential(embedding() if table is None else table, nn.Linear(3, 2, dtype=torch.float64))


def waiting(model: nn.Module) -> Twins:
    """Twins in the middle of a run, with rows that wait."""
    twins = Twins(model)
    begin(twins)
    return twins


def waiting_after(change: Callable[[Any], object], **options: Any) -> Twins:
    """The same, with a model and a twin that are changed, each by itself, before they get their optimizers."""
    twins: Twins = object.__new__(Twins)
    twins.model = embedding(**options)
    twins.twin = with_dense_gradients(twins.model)
    change(twins.model)
    change(twins.twin)
    twins.twin.load_state_dict(twins.model.state_dict())
    twins.ours, twins.theirs = optimizers(twins.model, twins.twin, weight_decay=0.1, lr=0.01)
    begin(twins)
    return twins


def begin(twins: Twins) -> None:
    twins.step(reading(torch.arange(40)))
    train(twins)


def train(twins: Twins, steps: int = 5) -> None:
    for _ in range(steps):
        twins.step(reading(zipf(20, 4)))


def assert_reads_alike(twins: Twins) -> None:
    whole = torch.arange(40)
    assert distance(twins.model(whole), twins.twin(whole)) <= BAR


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


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_model_is_scripted_between_its_forward_and_its_backward_pass() -> None:
    twins = waiting(network())
    reads = [model(IDS) for model in (twins.model, twins.twin)]
    torch.jit.script(twins.model)
    twins.each(lambda model, optimizer: optimizer.zero_grad())
    for read in reads:
        read.square().sum().backward()
    twins.each(lambda model, optimizer: optimizer.step())
    train(twins)
    twins.assert_same()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_model_is_scripted_when_its_optimizer_is_gone() -> None:
    twins = waiting(network())
    del twins.ours
    gc.collect()
    scripted: Any = torch.jit.script(twins.model)
    assert distance(scripted(torch.arange(40)), twins.twin(torch.arange(40))) <= BAR
    file = io.BytesIO()
    torch.jit.save(scripted, file)
    assert b"rowstep" not in file.getvalue()


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


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_model_that_is_traced_while_rows_wait() -> None:
    twins = waiting(network())
    traced = traced_by_torch(twins.model, check_trace=False)
    assert str(traced.inlined_graph).count("aten::index") == 0
    train(twins)
    twins.assert_same()


def test_a_symbolic_trace_reads_through_the_module() -> None:
    twins = waiting(network())
    graph = torch.fx.symbolic_trace(twins.model)
    assert distance(graph(torch.arange(40)), twins.twin(torch.arange(40))) <= BAR
    train(twins)
    twins.assert_same()


# Parametrizations


class Doubled(nn.Module):
    """A parametrization whose gradient stays sparse."""

    def forward(self, table: Tensor) -> Tensor:
        return 2 * table


class Centred(nn.Module):
    """A parametrization in which every row depends on all of them."""

    def forward(self, table: Tensor) -> Tensor:
        return table - table.mean(0)


def parametrized(model: Any, kind: type[nn.Module]) -> Any:
    parametrize.register_parametrization(model, "weight", kind())
    return model


def assert_tables_alike(twins: Twins) -> None:
    one, other = twins.model.state_dict(), twins.twin.state_dict()
    assert one.keys() == other.keys()
    for key in one:
        assert distance(one[key], other[key]) <= BAR


KINDS = [Doubled, Centred]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("early", [True, False], ids=["before", "after"])
def test_a_parametrized_table(kind: type[nn.Module], early: bool) -> None:
    if early:
        twins = waiting_after(lambda model: parametrized(model, kind), sparse=kind is Doubled)
    else:
        twins = waiting(embedding())
        twins.model.sparse = kind is Doubled
        twins.each(lambda model, _: parametrized(model, kind))
    for read in (
        assert_tables_alike,
        assert_reads_alike,
        assert_eval_flushes,
        assert_weights_alike,
        assert_copies_alike,
    ):
        train(twins)
        read(twins)
    twins.assert_same()


def assert_eval_flushes(twins: Twins) -> None:
    twins.model.eval()
    one, other = (model.parametrizations.weight.original for model in (twins.model, twins.twin))
    assert distance(one, other) <= BAR
    twins.model.train()


def assert_weights_alike(twins: Twins) -> None:
    """Read directly, and not by a lookup."""
    assert distance(twins.model.weight, twins.twin.weight) <= BAR


def assert_copies_alike(twins: Twins) -> None:
    assert distance(copy.deepcopy(twins.model).weight, twins.twin.weight) <= BAR


@pytest.mark.parametrize("leave", [True, False])
@pytest.mark.parametrize("early", [True, False], ids=["before", "after"])
def test_a_parametrization_that_is_removed(early: bool, leave: bool) -> None:
    twins = waiting_after(lambda model: parametrized(model, Doubled)) if early else waiting(embedding())
    if not early:
        twins.each(lambda model, _: parametrized(model, Doubled))
        train(twins)
    twins.each(lambda model, _: parametrize.remove_parametrizations(model, "weight", leave_parametrized=leave))
    assert not parametrize.is_parametrized(twins.model)
    assert isinstance(twins.model, nn.Embedding)
    train(twins)
    assert distance(in_memory(twins.model.weight), twins.twin.weight) > BAR
    assert_tables_alike(twins)
    assert type(copy.deepcopy(twins.model)) is nn.Embedding
    train(twins)
    twins.assert_same()


def test_a_parametrized_table_is_read_directly_at_once() -> None:
    twins = waiting(embedding())
    twins.each(lambda model, _: parametrized(model, Doubled))
    assert_weights_alike(twins)


def test_a_copy_of_a_parametrized_table_and_its_optimizer() -> None:
    for twins in (waiting_after(lambda model: parametrized(model, Doubled)), waiting(embedding())):
        if not parametrize.is_parametrized(twins.model):
            twins.each(lambda model, _: parametrized(model, Doubled))
            train(twins)
        original = twins.model, twins.ours
        twins.model, twins.ours = copy.deepcopy((twins.model, twins.ours))
        before = [param.detach().clone() for param in original[0].parameters()]
        train(twins, 10)
        assert_tables_alike(twins)
        twins.assert_same()
        assert all(torch.equal(one, other) for one, other in zip(original[0].parameters(), before, strict=True))


@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_a_normalised_table(norm: Callable[[nn.Module], nn.Module]) -> None:
    """torch's older way: a hook that computes the weight before each forward pass."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        twins = waiting_after(norm, sparse=False)
    train(twins)
    assert_tables_alike(twins)
    twins.assert_same()


# A module that holds its optimizer


class Trainer(nn.Module):
    """As Lightning has it: one object with the model and its optimizer, which knows the trainer."""

    def __init__(self, net: nn.Module, optimizer: DeferredAdam) -> None:
        super().__init__()
        self.net = net
        self.optimizer = optimizer
        optimizer.trainer = self  # type: ignore[attr-defined]

    def forward(self, batch: Tensor) -> Any:
        return self.net(batch)


def pickled(thing: Any) -> Any:
    return pickle.loads(pickle.dumps(thing))


def through_a_file(thing: Any) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = [copy.deepcopy, pickled, through_a_file]


def assert_both_go_on(twins: Twins, model: Any, optimizer: Any) -> None:
    """The copy and the original train as dense Adam does, each by itself."""
    assert model is not twins.model
    assert optimizer is not twins.ours
    other = copy.copy(twins)
    other.model, other.ours = model, optimizer
    other.twin, other.theirs = copy.deepcopy((twins.twin, twins.theirs))
    for both in (other, twins, other):
        train(both)
        assert distance(in_memory(table_of(both.model)), table_of(both.twin)) > BAR  # rows wait
        both.model.eval()
        assert distance(table_of(both.model), table_of(both.twin)) <= BAR
        both.model.train()
        train(both)
        both.assert_same()


def table_of(model: Any) -> Tensor:
    found = next(module for module in model.modules() if isinstance(module, nn.Embedding))
    return found.weight


@pytest.mark.parametrize("copied", WAYS)
def test_a_module_that_holds_its_optimizer(copied: Callable[[Any], Any]) -> None:
    twins = waiting(embedding())
    twins.model.opt = twins.ours
    model = copied(twins.model)
    assert model.opt.param_groups[0]["params"][0] is model.weight
    assert_both_go_on(twins, model, model.opt)


@pytest.mark.parametrize("copied", WAYS)
def test_an_optimizer_that_its_module_holds(copied: Callable[[Any], Any]) -> None:
    twins = waiting(network())
    twins.model[0].opt = twins.ours
    model, optimizer = copied((twins.model, twins.ours))
    assert model[0].opt is optimizer
    assert_both_go_on(twins, model, optimizer)
    optimizer, model = copied([twins.ours, twins.model])
    assert_both_go_on(twins, model, optimizer)


@pytest.mark.parametrize("copied", WAYS)
def test_an_optimizer_alone_that_its_module_holds(copied: Callable[[Any], Any]) -> None:
    twins = waiting(embedding())
    twins.model.opt = twins.ours
    optimizer = copied(twins.ours)
    model = embedding()
    (model.weight,) = optimizer.param_groups[0]["params"]
    assert_both_go_on(twins, model, optimizer)


@pytest.mark.parametrize("copied", WAYS)
def test_a_trainer_that_holds_both(copied: Callable[[Any], Any]) -> None:
    twins = waiting(network())
    trainer = copied(Trainer(twins.model, twins.ours))
    assert_both_go_on(twins, trainer.net, trainer.optimizer)


# What else is done to modules


def test_a_shallow_copy_reads_the_same_table() -> None:
    twins = waiting(embedding())
    other = copy.copy(twins.model)
    assert other.weight is twins.model.weight
    whole = torch.arange(40)
    assert distance(other(whole), twins.twin(whole)) <= BAR
    train(twins)
    other.eval()
    assert distance(other.weight, twins.twin.weight) <= BAR
    train(twins)
    twins.assert_same()


def test_a_weight_that_is_replaced() -> None:
    twins = waiting(embedding())
    old = twins.model.weight
    new = nn.Parameter(torch.randn(40, 3, dtype=torch.float64))
    twins.model.weight = new
    twins.model(torch.arange(40)).sum().backward()
    assert torch.equal(twins.model.state_dict()["weight"], new)
    twins.ours.flush()
    assert distance(old, twins.twin.weight) <= BAR


def test_weights_that_are_assigned() -> None:
    twins = waiting(embedding())
    old = twins.model.weight
    twins.model.load_state_dict({"weight": torch.zeros(40, 3, dtype=torch.float64)}, assign=True)
    assert distance(old, twins.twin.weight) <= BAR
    assert not twins.model(IDS).any()


@pytest.mark.parametrize(
    "convert", [lambda model: model.share_memory(), lambda model: model.double(), lambda model: model.cpu()]
)
def test_a_conversion_that_keeps_the_numbers(convert: Callable[[Any], Any]) -> None:
    twins = waiting(network())
    twins.each(lambda model, optimizer: optimizer.zero_grad())  # a sparse gradient cannot be shared
    twins.each(lambda model, _: convert(model))
    assert distance(twins.model[0].weight, twins.twin[0].weight) <= BAR
    train(twins)
    twins.assert_same()


def test_a_table_that_is_made_narrower_has_all_of_its_steps() -> None:
    twins = waiting(embedding())
    twins.model.float()
    assert distance(twins.model.weight, twins.twin.weight.float()) == 0


def test_what_a_module_is_whose_rows_wait() -> None:
    twins = waiting(network())
    table = twins.model[0]
    assert type(table) is nn.Embedding
    assert isinstance(table.weight, nn.Parameter)
    assert repr(table) == repr(twins.twin[0]).replace(")", ", sparse=True)")
    twins.model.apply(lambda module: None)
    assert [name for name, _ in twins.model.named_parameters()] == ["0.weight", "1.weight", "1.bias"]

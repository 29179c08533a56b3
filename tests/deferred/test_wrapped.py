"""Models with rows that wait under what torch does to modules: compiled, scripted, parametrized, converted, copied."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported
from torch._dynamo.utils import counters
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.nn.utils import parametrize

from rowstep import StaleRowsError
from tests.helpers.copies import objects_through_a_file, pickled
from tests.helpers.deferred_cases import BAR, Forward, bag, distance, embedding, in_memory, waiting

pytestmark = pytest.mark.usefixtures("backend")

IDS = torch.tensor([1, 2, 30])


def network() -> nn.Sequential:
    return nn.Sequential(embedding(), nn.Linear(3, 2, dtype=torch.float64))


# Compilers, scripts, traces


def through(ways: dict[nn.Module, Any], batch: Tensor) -> Forward:
    return lambda model: ways[model](batch)


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")  # inductor's
def test_a_compiled_model(compiler: str, backend: str) -> None:
    if compiler == "inductor" and backend == "reference":
        pytest.skip("compiling takes seconds, and the model does not know the backend")
    torch.compiler.reset()
    twins = waiting(network())
    compiled: Any = torch.compile(twins.model, backend=compiler)
    try:
        compiled(IDS)
    except Exception as error:
        if compiler == "inductor":
            pytest.skip(f"inductor cannot compile here: {type(error).__name__}")
        raise
    for step in range(12):
        batch = torch.tensor([step % 5, 5 + step % 7, 39 - step])
        twins.step(through({twins.model: compiled, twins.twin: twins.twin}, batch))
    twins.assert_same()


class Towers(nn.Module):
    """Nine tables, one more than the number of times that torch compiles a function before it warns and gives up."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(embedding(40 + at) for at in range(9))
        self.bag = bag()

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.bag(ids.unsqueeze(1))
        for table in self.tables:
            found = found + table(ids)
        return found


def test_a_compiled_model_is_not_compiled_anew_at_every_step() -> None:
    torch.compiler.reset()
    twins = waiting(Towers())
    compiled: Any = torch.compile(twins.model, backend="eager")
    frames = []
    counters.clear()
    for step in range(12):
        twins.step(through({twins.model: compiled, twins.twin: twins.twin}, (torch.arange(3) * step) % 40))
        frames.append(counters["frames"]["total"])
    twins.assert_same()
    assert frames[-1] == frames[1]
    assert not [reason for reason in counters["unimplemented"] if "recompile" in reason]


def test_a_whole_graph_is_refused_for_a_reason() -> None:
    torch.compiler.reset()
    twins = waiting(network())
    compiled: Any = torch.compile(twins.model, backend="eager", fullgraph=True)
    with pytest.raises(Unsupported, match=r"Message: rows of this table wait for .* depends on the ids"):
        compiled(IDS)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_an_exported_model() -> None:
    twins = waiting(network())
    exported = torch.export.export(twins.model.eval(), (IDS,)).module()
    assert distance(exported(IDS), twins.twin(IDS)) <= BAR
    twins.model.train()
    twins.run(1, rows=20)
    twins.assert_same()


def test_a_lookup_under_vmap() -> None:
    twins = waiting(network())
    batch = torch.arange(40).reshape(10, 4)
    reads = [torch.func.vmap(model)(batch) for model in (twins.model, twins.twin)]
    assert distance(*reads) <= BAR
    twins.run(1, rows=20)
    twins.assert_same()


@pytest.mark.parametrize("count", [3, 5000])
def test_ids_that_another_tensor_wraps(count: int) -> None:
    """As a functional collective returns them. The wrapper has no memory of its own."""
    twins = waiting(embedding())
    ids = torch.arange(count) % 40
    assert AsyncCollectiveTensor(ids).data_ptr() == 0
    assert distance(twins.model(AsyncCollectiveTensor(ids)), twins.twin(ids)) <= BAR
    twins.run(1, rows=20)
    twins.ours.catch_up(twins.model.weight, AsyncCollectiveTensor(ids))
    assert distance(in_memory(twins.model.weight)[ids], twins.twin.weight[ids]) <= BAR
    twins.assert_same()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_ids_of_several_lengths() -> None:
    twins = waiting(embedding())
    ids = torch.nested.nested_tensor([torch.tensor([1, 30]), torch.tensor([39])])
    reads = [torch.cat(model(ids).unbind()) for model in (twins.model, twins.twin)]
    assert distance(*reads) <= BAR
    twins.run(1, rows=20)
    twins.assert_same()


def test_a_copy_without_memory() -> None:
    model = copy.deepcopy(waiting(network()).model).to("meta")
    assert model(IDS.to("meta")).shape == (3, 2)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # torch.jit's own
def test_a_scripted_model() -> None:
    twins = waiting(network())
    twins.ours.flush()  # a script has the weights as they lie in memory
    scripted: Any = torch.jit.script(twins.model)
    assert distance(scripted(torch.arange(40)), twins.twin(torch.arange(40))) <= BAR
    twins.run(5, rows=20)
    twins.ours.zero_grad()
    scripted(torch.tensor([39])).sum().backward()
    with pytest.raises(StaleRowsError, match="a scripted module"):
        twins.ours.step()
    twins.run(5, rows=20)
    twins.assert_same()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("gone", [False, True])
def test_a_traced_model(gone: bool) -> None:
    twins = waiting(network())
    if gone:
        del twins.ours
        gc.collect()
    twins.model.eval()
    traced: Any = torch.jit.trace(twins.model, (IDS,))  # type: ignore[no-untyped-call]
    assert distance(traced(IDS + 5), twins.twin(IDS + 5)) <= BAR
    assert "aten::embedding" in str(traced.inlined_graph)
    assert str(traced.inlined_graph).count("aten::index") == 0  # what brings rows up to date is no part of the model
    if not gone:
        twins.model.train()
        twins.run(5, rows=20)
        twins.assert_same()


# Parametrizations


class Doubled(nn.Module):
    """A parametrization whose gradient stays sparse."""

    def forward(self, table: Tensor) -> Tensor:
        return 2 * table


def test_a_table_that_is_parametrized_while_rows_wait() -> None:
    twins = waiting(embedding())
    twins.each(lambda model, _: parametrize.register_parametrization(model, "weight", Doubled()))
    # Whether the table is saved, looked up, read, or copied, after steps each time.
    whole = torch.arange(40)
    twins.run(5, rows=20)
    one, other = twins.model.state_dict(), twins.twin.state_dict()
    assert one.keys() == other.keys()
    assert all(distance(one[key], other[key]) <= BAR for key in one)
    twins.run(5, rows=20)
    assert distance(twins.model(whole), twins.twin(whole)) <= BAR
    twins.run(5, rows=20)
    assert distance(twins.model.weight, twins.twin.weight) <= BAR
    twins.run(5, rows=20)
    assert distance(copy.deepcopy(twins.model).weight, twins.twin.weight) <= BAR
    twins.each(lambda model, _: parametrize.remove_parametrizations(model, "weight", leave_parametrized=True))
    assert type(copy.deepcopy(twins.model)) is nn.Embedding
    twins.run(5, rows=20)
    twins.assert_same()


# A module that holds its optimizer


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled, objects_through_a_file])
def test_a_module_that_holds_its_optimizer(copied: Callable[[Any], Any]) -> None:
    """The copy and the original train as dense Adam does, each by itself."""
    twins = waiting(embedding())
    twins.model.opt = twins.ours
    other = copy.copy(twins)
    other.model = copied(twins.model)
    other.ours = other.model.opt
    assert other.ours.param_groups[0]["params"][0] is other.model.weight
    assert other.model is not twins.model
    other.twin, other.theirs = copy.deepcopy((twins.twin, twins.theirs))
    for both in (other, twins, other):
        both.run(5, rows=20)
        assert distance(in_memory(both.model.weight), both.twin.weight) > BAR  # rows wait
        both.model.eval()
        assert distance(both.model.weight, both.twin.weight) <= BAR
        both.model.train()
        both.run(5, rows=20)
        both.assert_same()


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
    twins.run(5, rows=20)
    twins.assert_same()

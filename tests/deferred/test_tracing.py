"""Tables under what torch does to modules: compile, export, transforms, copies without memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported
from torch._dynamo.utils import counters

from tests.helpers.deferred_cases import BAR, Forward, bag, distance, embedding, waiting

pytestmark = pytest.mark.usefixtures("backend")

IDS = torch.tensor([1, 2, 30])


def network() -> nn.Module:
    return nn.Sequential(embedding(), nn.Linear(3, 2, dtype=torch.float64))


def through(ways: dict[nn.Module, Any], batch: Tensor) -> Forward:
    return lambda model: ways[model](batch)


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
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


def test_a_copy_without_memory() -> None:
    model = copy.deepcopy(waiting(network()).model).to("meta")
    assert model(IDS.to("meta")).shape == (3, 2)

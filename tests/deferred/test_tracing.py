"""Tables under what torch does to modules: compile, export, transforms, fake tensors."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.deferred_cases import BAR, Forward, Twins, distance, embedding, reading, zipf

pytestmark = pytest.mark.usefixtures("backend")

IDS = torch.tensor([1, 2, 30])


def waiting() -> Twins:
    """Twins in the middle of a run, with rows that wait."""
    twins = Twins(nn.Sequential(embedding(), nn.Linear(3, 2, dtype=torch.float64)))
    twins.step(lambda model: model(torch.arange(40)))
    for _ in range(5):
        train(twins)
    return twins


def train(twins: Twins) -> None:
    twins.step(reading(zipf(20, 4)))


def through(ways: dict[nn.Module, Any], batch: Tensor) -> Forward:
    return lambda model: ways[model](batch)


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")  # inductor's
def test_a_compiled_model(compiler: str, backend: str) -> None:
    if compiler == "inductor" and backend == "reference":
        pytest.skip("compiling takes seconds, and the model does not know the backend")
    torch.compiler.reset()
    twins = waiting()
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


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_an_exported_model() -> None:
    twins = waiting()
    exported = torch.export.export(twins.model.eval(), (IDS,)).module()
    assert distance(exported(IDS), twins.twin(IDS)) <= BAR
    twins.model.train()
    train(twins)
    twins.assert_same()


def test_a_lookup_under_vmap() -> None:
    twins = waiting()
    batch = torch.arange(40).reshape(10, 4)
    reads = [torch.func.vmap(model)(batch) for model in (twins.model, twins.twin)]
    assert distance(*reads) <= BAR
    train(twins)
    twins.assert_same()


FAKE_LOOKUP = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from tests.helpers.deferred_cases import *
class Other(torch.nn.Parameter):
    pass
other = Other(torch.ones(4, 3))
try:
    with FakeTensorMode(allow_non_fake_inputs=True):
        torch.nn.functional.embedding(torch.tensor([1]), other)
except TypeError:
    print("refused")
    raise SystemExit
model = embedding()
optimizer, _ = optimizers(model, with_dense_gradients(model))
for ids in ([1, 2], [3]):
    optimizer.zero_grad()
    model(torch.tensor(ids)).sum().backward()
    optimizer.step()
real = torch.tensor([5, 1, 3])
with FakeTensorMode(allow_non_fake_inputs=True):
    assert model(torch.tensor([5, 1, 3])).shape == (3, 3)
    assert model(real).shape == (3, 3)
    optimizer.flush()
optimizer.flush()
assert model.weight.isfinite().all()
print("alive")
"""


def test_a_lookup_of_fake_tensors(backend: str) -> None:
    """Shapes are all that is asked for, and there is no memory behind an address. In a process that may crash."""
    if backend == "reference":
        pytest.skip("it takes no addresses")
    run = subprocess.run(
        [sys.executable, "-c", FAKE_LOOKUP],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    if run.stdout == "refused\n":
        pytest.skip("this torch's fake tensors take no subclass of Parameter")
    assert run.stdout == "alive\n", f"ended with {run.returncode}: {run.stderr[-300:]}"


def test_a_copy_without_memory() -> None:
    model = copy.deepcopy(waiting().model).to("meta")
    assert model(IDS.to("meta")).shape == (3, 2)

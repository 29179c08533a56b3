"""A step among others: torch.compile, gradients that share memory under a scaler, a profiler."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from rowstep import SparseAdam

pytestmark = pytest.mark.usefixtures("backend")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 1))


def train(model: nn.Module, optimizer: SparseAdam, forward: Callable[[Tensor], Tensor]) -> None:
    for step in range(4):
        optimizer.zero_grad()
        torch.autograd.backward(forward(torch.tensor([1, 2, step])).square().sum())
        optimizer.step()


def test_an_eager_step_after_a_compiled_model() -> None:
    model, plain = network(), network()
    train(model, SparseAdam(model.parameters()), torch.compile(model, backend="aot_eager"))
    train(plain, SparseAdam(plain.parameters()), plain)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_a_scaler_divides_gradients_that_share_memory_once_if_one_is_cloned() -> None:
    """What docs/faq.md says: where outputs of tables are added, torch would divide the memory they share twice."""
    tables = [torch.nn.Embedding(4, 2, sparse=True) for _ in range(2)]
    optimizer = SparseAdam([module.weight for module in tables])
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    ids = torch.tensor([1])
    scaler.scale(((tables[0](ids) + tables[1](ids)) * torch.tensor([1.0, 2.0])).sum()).backward()
    for module in tables[1:]:
        assert module.weight.grad is not None
        module.weight.grad = module.weight.grad.clone()
    scaler.unscale_(optimizer)
    for module in tables:
        assert module.weight.grad is not None
        assert module.weight.grad.to_dense()[1].tolist() == [1.0, 2.0]


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # torch 2.10 says so to everyone who profiles
def test_a_profiler_names_the_step() -> None:
    model = network()
    optimizer = SparseAdam(model.parameters())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        train(model, optimizer, model)
    assert any(event.key == "Optimizer.step#SparseAdam.step" for event in profiler.key_averages())

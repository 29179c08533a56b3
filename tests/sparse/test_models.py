"""Gradients as models leave them: lookups, complex numbers, a scaler, a profiler."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from rowstep import SparseAdam

pytestmark = pytest.mark.usefixtures("backend")


def train(model: nn.Module, optimizer: torch.optim.Optimizer, loss_of: Callable[[nn.Module, int], Tensor]) -> None:
    for step in range(5):
        optimizer.zero_grad()
        torch.autograd.backward(loss_of(model, step))
        optimizer.step()


def assert_trains_as_under_torch(model: nn.Module, loss_of: Callable[[nn.Module, int], Tensor]) -> None:
    twin = copy.deepcopy(model)
    train(model, SparseAdam(model.parameters(), lr=0.01), loss_of)
    train(twin, torch.optim.SparseAdam(twin.parameters(), lr=0.01), loss_of)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert ours.grad is not None
        assert ours.grad.is_sparse
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def ids_at(step: int) -> Tensor:
    return torch.randint(20, (6, 3), generator=torch.Generator().manual_seed(step))


def test_embedding_with_padding_whose_output_is_summed() -> None:
    # The sum's gradient is one number expanded to all values: strides of 0.
    model = nn.Embedding(20, 4, sparse=True, padding_idx=0)
    assert_trains_as_under_torch(model, lambda model, step: model(ids_at(step) % 3).sum())
    assert not model.weight[0].any()


def test_several_lookups_in_one_forward_pass_arrive_as_one_gradient() -> None:
    model = nn.Embedding(20, 4, sparse=True)
    assert_trains_as_under_torch(model, lambda model, step: (model(ids_at(step)) * model(ids_at(step + 9))).sum())
    assert model.weight.grad is not None
    assert model.weight.grad._nnz() == 36


def test_a_complex_valued_model() -> None:
    # Knowledge-graph models (ComplEx, RotatE) conjugate: the gradient's values are then lazily negated views.
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.real, self.imag = nn.Embedding(20, 4, sparse=True), nn.Embedding(20, 4, sparse=True)

        def forward(self, ids: Tensor) -> Tensor:
            return torch.complex(self.real(ids), self.imag(ids)).conj()

    weights = torch.randn(6, 3, 4, dtype=torch.complex64)
    assert_trains_as_under_torch(Pair(), lambda model, step: (model(ids_at(step)) * weights).real.sum())


def test_a_step_is_in_place_without_a_graph_and_autograd_knows_of_it() -> None:
    model = nn.Embedding(20, 4, sparse=True)
    weight, address = model.weight, model.weight.data_ptr()
    optimizer = SparseAdam(model.parameters())
    loss = (model(torch.tensor([1, 2])) @ weight.t()).sum()
    model(torch.tensor([1, 2])).sum().backward()
    version = weight._version
    optimizer.step()
    assert weight.data_ptr() == address
    assert weight._version > version
    assert weight.is_leaf
    assert weight.requires_grad
    assert not any(value.requires_grad for value in optimizer.state[weight].values() if isinstance(value, Tensor))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


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
    model = nn.Embedding(20, 4, sparse=True)
    optimizer = SparseAdam(model.parameters())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        train(model, optimizer, lambda model, step: model(ids_at(step)).sum())
    assert any(event.key == "Optimizer.step#SparseAdam.step" for event in profiler.key_averages())

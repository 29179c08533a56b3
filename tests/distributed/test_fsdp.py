"""Dense layers under FSDP2, whose parameters are DTensors, and tables beside them, under one optimizer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import rowstep
from rowstep.distributed import ShardedEmbedding
from tests.helpers.ranks import Ranks

CASES: list[tuple[str, dict[str, Any]]] = [
    ("SparseAdam", {}),
    ("SparseAdam", {"bias_correction": "row"}),
    ("DeferredAdam", {}),
    ("DeferredAdamW", {"amsgrad": True}),
]


LIMIT = 0.5


def trained(rank: int | None, name: str, options: dict[str, Any], is_sharded: bool) -> tuple[list[Tensor], list[float]]:
    """The table and the layers after some steps, and the norm of each; the batch is the same on every rank."""
    torch.manual_seed(0)
    table: Any = nn.Embedding(50, 8, sparse=True, dtype=torch.float64)
    layers: Any = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)).double()
    if rank is not None:
        fully_shard(layers, mesh=init_device_mesh("cpu", (2,)))
        if is_sharded:
            table = ShardedEmbedding.from_embedding(table)
    optimizer: Any = getattr(rowstep, name)([*table.parameters(), *layers.parameters()], lr=0.01, **options)
    generator, norms = torch.Generator().manual_seed(1), []
    for step in range(12):
        ids = torch.randint(0, 50, (6,), generator=generator)
        optimizer.zero_grad()
        torch.autograd.backward(layers(table(ids)).square().mean())
        norm: Any = rowstep.clip_grad_norm_([*table.parameters(), *layers.parameters()], LIMIT)
        norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
        optimizer.step()
        if step == 7:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    if rank is None:
        return [table.weight.detach(), *(param.detach() for param in layers.parameters())], norms
    whole = table.to_embedding() if is_sharded else table
    return [whole.weight.detach().clone(), *(param.full_tensor().detach() for param in layers.parameters())], norms


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_layers_under_fsdp_are_clipped_and_step_beside_tables(
    ranks: Ranks, name: str, options: dict[str, Any], is_sharded: bool
) -> None:
    expected = trained(None, name, options, is_sharded)
    assert min(expected[1]) < LIMIT < max(expected[1])
    for found in ranks.run(2, trained, name, options, is_sharded):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


def wrap_a_table(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    for placement in ("divided", "everywhere"):
        tables: list[Any] = [ShardedEmbedding(51, 8, placement=placement) for _ in range(2)]
        weights = [table.weight for table in tables]
        with pytest.raises(TypeError, match=r"weight of table \d is to become a DTensor, as by fully_shard; expected"):
            fully_shard(nn.Sequential(tables[0], nn.Linear(8, 4)), mesh=mesh)
        model = fully_shard(nn.Sequential(tables[1], nn.Linear(8, 4)), mesh=mesh, ignored_params={weights[1]})
        for module, table, weight in zip((tables[0], model), tables, weights, strict=True):
            assert table.weight is weight
            torch.autograd.backward(module(torch.arange(5) + rank).sum())
            assert weight.grad is not None


def test_fully_shard_over_a_sharded_table_is_refused(ranks: Ranks) -> None:
    ranks.run(2, wrap_a_table)


def train_beside_a_host_table(rank: int | None) -> list[Tensor]:
    torch.manual_seed(0)
    table: Any = rowstep.HostEmbedding(50, 8, dtype=torch.float64, device="cpu")
    model = nn.Sequential(table, nn.Linear(8, 1, dtype=torch.float64))
    if rank is not None:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)), ignored_params={table.weight})
    optimizer = rowstep.SparseAdam(model.parameters(), lr=0.01)
    for ids in torch.randint(0, 50, (8, 6), generator=torch.Generator().manual_seed(1)):
        optimizer.zero_grad()
        torch.autograd.backward(model(ids).square().mean())
        rowstep.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return [getattr(param, "full_tensor", lambda p=param: p)().detach() for param in model.parameters()]


def test_a_host_table_among_the_ignored_parameters(ranks: Ranks) -> None:
    expected = train_beside_a_host_table(None)
    for found in ranks.run(2, train_beside_a_host_table):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


def step_a_dtensor(rank: int, name: str) -> None:
    """torch's own operations give it no sparse gradient, but programs can."""
    local = torch.ones(10, 4)
    table = nn.Parameter(DTensor.from_local(local, init_device_mesh("cpu", (2,)), [Shard(0)]))
    table.grad = torch.sparse_coo_tensor(torch.tensor([[1, 3]]), torch.ones(2, 4), table.shape, check_invariants=False)
    optimizer = getattr(rowstep, name)([table])
    with pytest.raises(TypeError, match=r"is a DTensor with a sparse gradient; expected a plain parameter"):
        optimizer.step()
    assert torch.equal(local, torch.ones(10, 4))


@pytest.mark.parametrize("name", ["SparseAdam", "DeferredAdam"])
def test_a_dtensor_with_a_sparse_gradient_is_refused(ranks: Ranks, name: str) -> None:
    ranks.run(2, step_a_dtensor, name)

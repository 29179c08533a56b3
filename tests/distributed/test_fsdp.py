"""Dense layers under FSDP2, whose parameters are DTensors, and tables beside them, under one optimizer."""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

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


SORTS = ("sharded", "sparse", "dense")
MIXES = [mix for size in range(4) for mix in itertools.combinations(SORTS, size)]
NORM_TYPES = (2.0, 1.0, 0.5, math.inf, 0.0, -1.0, -math.inf)


def clipped(rank: int | None, mix: tuple[str, ...], norm_type: float) -> tuple[Tensor, list[Tensor]]:
    """The norm of the gradients of layers and of what the mix names, and those that are not sharded, clipped."""
    torch.manual_seed(0)
    tables: Any = {sort: nn.Embedding(20, 8, sparse=True, dtype=torch.float64) for sort in ("sharded", "sparse")}
    dense = nn.Linear(8, 8, dtype=torch.float64)
    layers: Any = nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 1)).double()  # the last has no row on rank 1
    if rank is not None:
        fully_shard(layers, mesh=init_device_mesh("cpu", (2,)))
        tables["sharded"] = ShardedEmbedding.from_embedding(tables["sharded"])
    ids = torch.tensor([3, 4, 4, 17])
    torch.autograd.backward(layers(dense(tables["sharded"](ids) + tables["sparse"](ids % 5))).square().sum())
    modules = {**tables, "dense": dense}
    unused = nn.Parameter(torch.zeros(3))
    params = [unused, *layers.parameters(), *(param for sort in mix for param in modules[sort].parameters())]
    norm = rowstep.clip_grad_norm_(params, 1e-3, norm_type)
    whole = [param.grad for param in params if param is not tables["sharded"].weight and param.grad is not None]
    return norm, [getattr(grad, "full_tensor", grad.to_dense)() for grad in whole]


def clipped_in_all_mixes(rank: int | None) -> list[tuple[Tensor, list[Tensor]]]:
    if rank is None:
        return [clipped(None, mix, norm_type) for mix in MIXES for norm_type in NORM_TYPES]
    found = []
    for mix, norm_type in itertools.product(MIXES, NORM_TYPES):
        if norm_type > 0 or "sharded" not in mix:
            found.append(clipped(rank, mix, norm_type))
            continue
        with pytest.raises(ValueError, match="expected > 0 with sharded tables"):
            clipped(rank, mix, norm_type)
        found.append((torch.tensor(0.0), []))
    return found


def test_every_mix_with_layers_under_fsdp_has_the_norm_of_one_process(ranks: Ranks) -> None:
    results = ranks.run(2, clipped_in_all_mixes)
    expected = clipped_in_all_mixes(None)
    for found in results:
        cases = itertools.product(MIXES, NORM_TYPES)
        for (mix, norm_type), (norm, grads), (true_norm, true_grads) in zip(cases, found, expected, strict=True):
            if grads:
                assert type(norm) is Tensor
                torch.testing.assert_close(norm, true_norm, rtol=1e-11, atol=0, msg=f"{mix} {norm_type}: {norm}")
                torch.testing.assert_close(grads, true_grads, rtol=1e-11, atol=1e-15)


PLACEMENTS: list[tuple[Any, Any]] = [
    (Shard(0), Shard(1)),
    (Shard(0), Shard(0)),
    (Replicate(), Shard(0)),
    (Shard(1), Replicate()),
    (Replicate(), Replicate()),
    (Partial(), Shard(0)),
    (Partial("avg"), Partial()),
]


def clip_placed_gradients(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    for those in ([placements] for placements in PLACEMENTS), [PLACEMENTS]:
        for placements in those:
            grads = [gradient(mesh, each) for each in placements]
            params = [nn.Parameter(torch.zeros_like(grad)) for grad in grads]
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad
            before = [grad.full_tensor().clone() for grad in grads]
            for norm_type, limit in ((3.0, 1e9), (2.0, 0.1)):
                norm = rowstep.clip_grad_norm_(params, limit, norm_type)
                torch.testing.assert_close(norm, torch.nn.utils.get_total_norm(before, norm_type), rtol=1e-11, atol=0)
            expected = [grad * (0.1 / (norm + 1e-6)) for grad in before]
            torch.testing.assert_close([grad.full_tensor() for grad in grads], expected, rtol=1e-11, atol=0)
    with pytest.raises(ValueError, match=r"a partial placement, .*; expected shards or replicas"):
        rowstep.clip_grad_value_(params, 0.1)


def gradient(mesh: Any, placements: tuple[Any, Any]) -> DTensor:
    """One with other numbers on every rank, unless they are replicas."""
    coordinates = zip(mesh.get_coordinate(), placements, strict=True)
    seed = sum(2**dim * at for dim, (at, each) in enumerate(coordinates) if not each.is_replicate())
    local = torch.randn(2, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return DTensor.from_local(local, mesh, placements, run_check=False)


def test_dtensor_gradients_of_every_placement_are_clipped(ranks: Ranks) -> None:
    ranks.run(4, clip_placed_gradients)


def clip_a_row_outside(rank: int) -> None:
    table, sharded = nn.Embedding(20, 8, sparse=True), ShardedEmbedding(20, 8)
    layers: Any = fully_shard(nn.Linear(8, 1), mesh=init_device_mesh("cpu", (2,)))
    ids = torch.arange(3)
    for with_shards, others in ((True, r"rank 1: IndexError: .*index 99"), (False, "failed on rank 1; see")):
        params = [*layers.parameters(), *table.parameters(), *(sharded.parameters() if with_shards else [])]
        for param in params:
            param.grad = None
        layers(table(ids) + sharded(ids)).sum().backward()
        before = [param.grad for param in params if param.grad is not None]
        kept = [grad.clone() for grad in before]
        if rank == 1:
            outside = torch.tensor([[99]])
            table.weight.grad = torch.sparse_coo_tensor(outside, torch.ones(1, 8), (20, 8), check_invariants=False)
        with pytest.raises(IndexError if rank == 1 else RuntimeError, match="index 99" if rank == 1 else others):
            rowstep.clip_grad_norm_(params, 1e-3)
        table.weight.grad = None
        for grad, old in zip(before, kept, strict=True):
            difference: Any = grad - old
            assert not getattr(difference, "full_tensor", lambda d=difference: d)().to_dense().any()
        rowstep.clip_grad_norm_(params, 1e-3)  # and all can go on


def test_a_row_outside_on_one_rank_is_heard_by_all(ranks: Ranks) -> None:
    ranks.run(2, clip_a_row_outside)


def say_what_is_not_finite(rank: int) -> None:
    table = nn.Embedding(20, 8, sparse=True)
    layers: Any = fully_shard(nn.Linear(8, 2), mesh=init_device_mesh("cpu", (2,)))
    layers(table(torch.arange(3))).sum().backward()
    if rank == 1:
        layers.weight.grad.to_local()[0, 0] = -math.inf
    for params in ([*layers.parameters(), *table.parameters()], list(layers.parameters())):
        for norm_type in (2.0, math.inf):
            with pytest.raises(RuntimeError, match=rf"order {norm_type} for gradients is inf, so it cannot"):
                rowstep.clip_grad_norm_(params, 1.0, norm_type, error_if_nonfinite=True)


def test_a_norm_that_is_not_finite_is_the_same_on_all_ranks(ranks: Ranks) -> None:
    ranks.run(2, say_what_is_not_finite)


def clamp_beside_layers(rank: int) -> None:
    layers: Any = fully_shard(nn.Linear(8, 1), mesh=init_device_mesh("cpu", (2,)))
    dense = nn.Linear(8, 8)
    torch.autograd.backward(layers(dense(torch.full((1, 8), 9.0))).square().sum())
    params = [*layers.parameters(), *dense.parameters()]
    rowstep.clip_grad_value_(params, 0.25)
    for param in params:
        whole: Any = getattr(param.grad, "full_tensor", lambda p=param: p.grad)()
        assert 0 < whole.abs().max() <= 0.25


def test_values_are_clamped_beside_layers_under_fsdp(ranks: Ranks) -> None:
    ranks.run(2, clamp_beside_layers)


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

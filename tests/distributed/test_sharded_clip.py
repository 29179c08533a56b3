"""Clipping by the norm of gradients that are spread over ranks: as one process clips that has them all."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import rowstep
from rowstep.distributed import ShardedEmbedding, ShardedEmbeddingBag
from tests.helpers.ranks import Ranks

WIDTH = 3
CASES = [(norm_type, limit) for norm_type in (2.0, 0.5, math.inf) for limit in (0.01, 1e6)]


class Model(nn.Module):
    """Two sharded tables, one of which leaves ranks without a row, a whole table and a dense layer."""

    def __init__(self, sharded: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        large = nn.Embedding(53, WIDTH, sparse=True, dtype=torch.float64)
        tiny = nn.EmbeddingBag(2, WIDTH, mode="sum", sparse=True, dtype=torch.float64)
        self.large: nn.Module = ShardedEmbedding.from_embedding(large) if sharded else large
        self.tiny: nn.Module = ShardedEmbeddingBag.from_embedding(tiny) if sharded else tiny
        self.whole = nn.Embedding(9, WIDTH, sparse=True, dtype=torch.float64)
        self.dense = nn.Linear(WIDTH, 1, dtype=torch.float64)

    def forward(self, ids: Tensor) -> Tensor:
        read = self.large(ids) + self.tiny((ids % 2).unsqueeze(1)) + self.whole(ids % 9)
        loss: Tensor = self.dense(read).sin().sum()
        return loss


def ids_of(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(53, (0 if rank == 1 else 12,), generator=generator)


def ready_for_clipping(rank: int, ranks: int) -> Any:
    """A model after its backward pass; what is not sharded has the same gradients on all ranks."""
    model = Model(sharded=True)
    torch.autograd.backward(model(ids_of(rank)))
    for param in (*model.whole.parameters(), *model.dense.parameters()):
        assert param.grad is not None
        full = param.grad.to_dense()
        dist.all_reduce(full)
        param.grad = (full / ranks).to_sparse(1) if param.grad.is_sparse else full / ranks
    return model


def alone(ranks: int) -> Any:
    model = Model(sharded=False)
    for rank in range(ranks):
        torch.autograd.backward(model(ids_of(rank)) / ranks)
    return model


def full_gradients(model: Any) -> list[Tensor]:
    found = []
    for module in (model.large, model.tiny):
        owned = module._shard.positions
        full = torch.zeros(module.num_embeddings, WIDTH, dtype=torch.float64)
        if module.weight.grad is not None:
            full[module._shard.order.ids(torch.arange(owned.start, owned.stop))] = module.weight.grad.to_dense()
        dist.all_reduce(full)
        found.append(full)
    return [*found, *(param.grad.to_dense() for param in (model.whole.weight, *model.dense.parameters()))]


def clip_in_all_ways(rank: int, ranks: int) -> list[tuple[Tensor, list[Tensor]]]:
    seen = []
    for norm_type, limit in CASES:
        model = ready_for_clipping(rank, ranks)
        seen.append((rowstep.clip_grad_norm_(model.parameters(), limit, norm_type), full_gradients(model)))
        assert model.large.weight.grad.is_sparse
    return seen


def test_norm_and_clipped_gradients_are_those_of_one_process(ranks: Ranks) -> None:
    for found in ranks.run(4, clip_in_all_ways, 4):
        for (norm_type, limit), (norm, grads) in zip(CASES, found, strict=True):
            model = alone(4)
            expected = rowstep.clip_grad_norm_(model.parameters(), limit, norm_type)
            torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
            whole = [param.grad.to_dense() for param in model.parameters()]
            torch.testing.assert_close(grads, whole, rtol=1e-12, atol=1e-15)


def gradients_of_every_sort(rank: int) -> None:
    model = ready_for_clipping(rank, 3)
    params = list(model.parameters())
    model.large.weight.grad = None if rank == 0 else model.large.weight.grad
    norm, squares = rowstep.clip_grad_norm_(params, 1e6), sum(grad.square().sum() for grad in full_gradients(model))
    torch.testing.assert_close(norm, torch.as_tensor(squares).sqrt(), rtol=1e-12, atol=0)
    assert (model.large.weight.grad is None) == (rank == 0)

    # An order of parameters that begins with a whole one, and one that has nothing else than shards.
    torch.testing.assert_close(rowstep.clip_grad_norm_(params[::-1], 1e6), norm, rtol=1e-12, atol=0)
    shards = rowstep.clip_grad_norm_([model.large.weight, model.tiny.weight], 1e6)
    assert 0 < float(shards) < float(norm)
    one = rowstep.clip_grad_norm_(model.tiny.weight, 1e6)  # of three ranks one has no row of it
    assert 0 < float(one) < float(shards)

    for param in params:
        param.grad = None
    assert float(rowstep.clip_grad_norm_(params, 1.0)) == 0
    for norm_type in (0, -math.inf):  # a rank without gradients would count as one whose gradients are 0
        with pytest.raises(ValueError, match="Invalid norm_type value"):
            rowstep.clip_grad_norm_(params, 1.0, norm_type)

    # Norms of what is not sharded, and values, need no other rank: only one makes the call.
    if rank == 1:
        model.dense.weight.grad = torch.ones_like(model.dense.weight)
        assert float(rowstep.clip_grad_norm_(model.dense.parameters(), 1.0)) == math.sqrt(WIDTH)
        rowstep.clip_grad_value_(model.parameters(), 0.01)


def groups_of_their_own(rank: int) -> None:
    """A table of some ranks counts their rows, and one of all ranks everybody's."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    torch.manual_seed(0)
    plain = nn.Embedding(11, WIDTH, sparse=True)
    of_pair = ShardedEmbedding.from_embedding(plain, group=pairs[rank // 2], gradient="sum")
    of_all = ShardedEmbedding.from_embedding(plain, gradient="sum")
    (of_pair(torch.tensor([0, 1, 2])).sum() + of_all(torch.tensor([5, 6])).sum()).backward()
    norm = rowstep.clip_grad_norm_([of_pair.weight, of_all.weight], 1.0)
    expected = torch.tensor(float(3 * WIDTH * 2**2 + 2 * WIDTH * 4**2)).sqrt()
    torch.testing.assert_close(norm, expected)
    again = rowstep.clip_grad_norm_([of_pair.weight, of_all.weight], 1.0)
    torch.testing.assert_close(again, torch.tensor(1.0))
    assert of_pair.weight.grad is not None
    torch.testing.assert_close(of_pair.weight.grad.to_dense().max(), 2 / expected)


@pytest.mark.parametrize(("count", "program"), [(3, gradients_of_every_sort), (4, groups_of_their_own)])
def test_ranks_without_gradients_and_tables_of_different_groups(
    ranks: Ranks, count: int, program: Callable[[int], None]
) -> None:
    ranks.run(count, program)

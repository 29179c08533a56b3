"""Sharded tables against one process that holds the whole table."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rowstep
from ranks import Ranks
from rowstep.distributed import ShardedEmbedding, ShardedEmbeddingBag

ROWS, WIDTH, STEPS = 103, 5, 50


def batch(step: int, rank: int, ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    """Ids with their offsets and weights; every third step some rank has none."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    count = 0 if (step + rank) % 3 == 0 else 4 * (rank + 2)
    ids = torch.randint(ROWS, (count,), generator=generator) ** 2 // ROWS  # small ids are the popular ones
    offsets = torch.arange(0, count + 1, 4)
    return ids, offsets, torch.rand(count, generator=generator, dtype=torch.float64)


def loss_of(table: Any, part: tuple[Tensor, Tensor, Tensor], kind: str, dtype: torch.dtype) -> Tensor:
    ids, offsets, weights = part
    if kind == "embedding":
        rows = table(ids)
    elif kind == "bag, weighted":
        rows = table(ids, offsets, per_sample_weights=weights.to(dtype))
    else:
        rows = table(ids, offsets)
    loss: Tensor = (rows * torch.linspace(1, 2, WIDTH, dtype=dtype)).sin().sum()
    return loss


def plain_table(kind: str, dtype: torch.dtype) -> nn.Embedding | nn.EmbeddingBag:
    torch.manual_seed(7)
    if kind == "embedding":
        return nn.Embedding(ROWS, WIDTH, padding_idx=3, sparse=True, dtype=dtype)
    mode = "mean" if kind == "bag, mean" else "sum"
    return nn.EmbeddingBag(ROWS, WIDTH, mode=mode, include_last_offset=True, padding_idx=3, sparse=True, dtype=dtype)


def make_optimizer(name: str, table: nn.Module) -> torch.optim.Optimizer:
    if name == "DeferredAdamW":
        return rowstep.DeferredAdamW(table, lr=0.05)
    return rowstep.SparseAdam(table.parameters(), lr=0.05)


def train_sharded(rank: int, ranks: int, kind: str, optimizer_name: str, dtype: torch.dtype) -> Tensor:
    plain = plain_table(kind, dtype)
    table: Any
    if isinstance(plain, nn.Embedding):
        table = ShardedEmbedding.from_embedding(plain)
    else:
        table = ShardedEmbeddingBag.from_embedding(plain)
    optimizer = make_optimizer(optimizer_name, table)
    for step in range(STEPS):
        optimizer.zero_grad()
        torch.autograd.backward(loss_of(table, batch(step, rank, ranks), kind, dtype))
        optimizer.step()
    whole: Tensor = table.to_embedding().weight.detach()
    return whole


def train_alone(ranks: int, kind: str, optimizer_name: str, dtype: torch.dtype) -> Tensor:
    table = plain_table(kind, dtype)
    optimizer = make_optimizer(optimizer_name, table)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(ranks):
            torch.autograd.backward(loss_of(table, batch(step, rank, ranks), kind, dtype) / ranks)
        optimizer.step()
    table.eval()
    return table.weight.detach()


@pytest.mark.parametrize("ranks_count", [2, 3, 4])
@pytest.mark.parametrize("optimizer_name", ["SparseAdam", "DeferredAdamW"])
@pytest.mark.parametrize("kind", ["embedding", "bag, sum", "bag, mean", "bag, weighted"])
def test_ranks_end_where_one_process_ends(ranks: Ranks, ranks_count: int, optimizer_name: str, kind: str) -> None:
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float64, 1e-12)):
        expected = train_alone(ranks_count, kind, optimizer_name, dtype)
        for whole in ranks.run(ranks_count, train_sharded, ranks_count, kind, optimizer_name, dtype):
            torch.testing.assert_close(whole, expected, rtol=0, atol=tolerance)

"""Sharded tables against one process that holds the whole table: fifty steps of training end in the same weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rowstep
from rowstep.distributed import ShardedEmbedding, ShardedEmbeddingBag
from tests.helpers.deferred_cases import only_long
from tests.helpers.ranks import Ranks

ROWS, WIDTH, STEPS, PADDING = 103, 5, 50, 3
# Gradients that are off by one rounding move the float32 weights of one process by 2e-7 at this rate, 1.6e-6 at 0.05.
LEARNING_RATE = 0.01
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}

Batch = tuple[Tensor, Tensor, Tensor]


def batch(step: int, rank: int) -> Batch:
    """Ids with their offsets and weights; at every step some rank has none, and at some steps only one has any."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    has_none = (step + rank) % 3 == 0 or (step % 10 == 9 and rank != 1)
    count = 0 if has_none else 4 * (rank + 2)
    ids = torch.randint(ROWS, (count,), generator=generator) ** 2 // ROWS  # small ids are the popular ones
    return ids, torch.arange(0, count + 1, 4), torch.rand(count, generator=generator, dtype=torch.float64)


def plain_tables(dtype: torch.dtype) -> nn.ModuleDict:
    torch.manual_seed(7)

    def bag(mode: str) -> nn.EmbeddingBag:
        return nn.EmbeddingBag(
            ROWS, WIDTH, mode=mode, include_last_offset=True, padding_idx=PADDING, sparse=True, dtype=dtype
        )

    embedding = nn.Embedding(ROWS, WIDTH, padding_idx=PADDING, sparse=True, dtype=dtype)
    return nn.ModuleDict({"embedding": embedding, "sum": bag("sum"), "mean": bag("mean"), "weighted": bag("sum")})


def sharded(plain: nn.ModuleDict) -> nn.ModuleDict:
    return nn.ModuleDict(
        {
            kind: ShardedEmbedding.from_embedding(table)
            if isinstance(table, nn.Embedding)
            else ShardedEmbeddingBag.from_embedding(table)  # type: ignore[arg-type]
            for kind, table in plain.items()
        }
    )


def loss_of(tables: nn.ModuleDict, part: Batch, dtype: torch.dtype) -> Tensor:
    ids, offsets, weights = part
    read = [
        tables["embedding"](ids),
        tables["sum"](ids, offsets),
        tables["mean"](ids, offsets),
        tables["weighted"](ids, offsets, per_sample_weights=weights.to(dtype)),
    ]
    loss: Tensor = (torch.cat(read) * torch.linspace(1, 2, WIDTH, dtype=dtype)).sin().sum()
    return loss


def make_optimizer(name: str, tables: nn.Module) -> torch.optim.Optimizer:
    if name == "DeferredAdamW":
        return rowstep.DeferredAdamW(tables, lr=LEARNING_RATE)
    return rowstep.SparseAdam(tables.parameters(), lr=LEARNING_RATE)


def train_sharded(rank: int, optimizer_name: str) -> dict[torch.dtype, dict[str, Tensor]]:
    ends = {}
    for dtype in TOLERANCE:
        tables: Any = sharded(plain_tables(dtype))
        optimizer = make_optimizer(optimizer_name, tables)
        for step in range(STEPS):
            optimizer.zero_grad()
            torch.autograd.backward(loss_of(tables, batch(step, rank), dtype))
            optimizer.step()
        ends[dtype] = {kind: table.to_embedding().weight.detach() for kind, table in tables.items()}
    return ends


def train_alone(ranks: int, optimizer_name: str, dtype: torch.dtype) -> dict[str, Tensor]:
    tables: Any = plain_tables(dtype)
    optimizer = make_optimizer(optimizer_name, tables)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(ranks):
            torch.autograd.backward(loss_of(tables, batch(step, rank), dtype) / ranks)
        optimizer.step()
    tables.eval()
    return {kind: table.weight.detach() for kind, table in tables.items()}


@pytest.mark.parametrize("ranks_count", [2, 3, pytest.param(4, marks=only_long)])
@pytest.mark.parametrize("optimizer_name", ["SparseAdam", "DeferredAdamW"])
def test_ranks_end_where_one_process_ends(ranks: Ranks, ranks_count: int, optimizer_name: str) -> None:
    ends = ranks.run(ranks_count, train_sharded, optimizer_name)
    for dtype, tolerance in TOLERANCE.items():
        expected = train_alone(ranks_count, optimizer_name, dtype)
        start = dict(plain_tables(dtype).state_dict())
        for kind, weight in expected.items():
            assert float((weight - start[f"{kind}.weight"]).abs().max()) > 0.1, "nothing was trained"
            for tables in ends:
                torch.testing.assert_close(tables[dtype][kind], weight, rtol=0, atol=tolerance)

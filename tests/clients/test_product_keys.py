"""Product-key memory in a layer of a network: https://github.com/facebookresearch/XLM, xlm/model/memory (PKM).

A query is compared with two small sets of keys, and the sums of the best of both halves choose a few of size^2 values.
Values are a sparse EmbeddingBag, weighted by ``per_sample_weights``, and have an optimizer and an lr of their own.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rowstep import DeferredAdam, SparseAdam
from tests.clients.side_by_side import Both, Seen, assert_same_run

WIDTH, HEADS, KEYS, NEAREST = 8, 2, 16, 4


class Memory(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, HEADS * WIDTH)
        self.keys = nn.Parameter(torch.randn(2, HEADS, KEYS, WIDTH // 2))
        self.values = nn.EmbeddingBag(KEYS**2, WIDTH, mode="sum", sparse=sparse)
        nn.init.normal_(self.values.weight, std=WIDTH**-0.5)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(x).view(len(x), HEADS, 2, WIDTH // 2)
        halves = torch.einsum("bhtd,thkd->tbhk", query, self.keys).topk(NEAREST, dim=-1)
        score = (halves.values[0][..., :, None] + halves.values[1][..., None, :]).flatten(-2)
        place = (halves.indices[0][..., :, None] * KEYS + halves.indices[1][..., None, :]).flatten(-2)
        best = score.topk(NEAREST, dim=-1)
        weight = best.values.softmax(-1).flatten(1)
        return self.values(place.gather(-1, best.indices).flatten(1), per_sample_weights=weight)


def train(make: Any, sparse: bool, seen: Seen) -> None:
    memory = Memory(sparse)
    network = nn.Sequential(nn.Linear(3, WIDTH), nn.Tanh(), memory, nn.Linear(WIDTH, 1)).double()
    values = memory.values.weight
    others = [param for param in network.parameters() if param is not values]
    optimizer = make(others, values)
    random = torch.Generator().manual_seed(1)
    points = torch.randn(60, 3, generator=random, dtype=torch.float64)
    for _ in range(12):
        for batch in points.split(20):
            optimizer.zero_grad()
            loss = (network(batch).squeeze(1) - batch.prod(1).sin()).square().mean()
            loss.backward()
            optimizer.step()
            seen.after_step(loss.detach(), network, optimizer)


def groups(others: list[Tensor], values: Tensor) -> list[dict[str, Any]]:
    return [{"params": others}, {"params": [values], "lr": 1e-2}]


def test_sparse_adam() -> None:
    def two_optimizers(others: list[Tensor], values: Tensor) -> Both:
        return Both(torch.optim.Adam(others, lr=2e-3), torch.optim.SparseAdam([values], lr=1e-2))

    def one_optimizer(others: list[Tensor], values: Tensor) -> SparseAdam:
        return SparseAdam(groups(others, values), lr=2e-3)

    assert_same_run("product-key memory, SparseAdam", train, two_optimizers, one_optimizer)


@pytest.mark.parametrize("every", [1, 7])
def test_deferred_adam(every: int) -> None:
    def adam(others: list[Tensor], values: Tensor) -> torch.optim.Adam:
        return torch.optim.Adam(groups(others, values), lr=2e-3)

    def deferred(others: list[Tensor], values: Tensor) -> DeferredAdam:
        return DeferredAdam(groups(others, values), lr=2e-3)

    assert_same_run("product-key memory, DeferredAdam", train, adam, deferred, theirs_sparse=False, every=every)

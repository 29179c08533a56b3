"""DLRM: https://github.com/facebookresearch/dlrm, as its own random data generator feeds it.

26 tables of EmbeddingBag, as many as Criteo's data has, over random bags with fixed weights (``weighted_pooling``); dot
products between all pairs of features; two small perceptrons. The program uses SGD: no Adam of torch takes both its
sparse and its dense gradients.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rowstep import DeferredAdam, SparseAdam
from tests.clients.side_by_side import Seen, assert_same_as_adam, assert_same_run
from tests.helpers.ratings import TorchsTwo

TABLES, WIDTH, DENSE, BATCH = 26, 4, 5, 16
SIZES = [3 + 11 * table for table in range(TABLES)]


class DLRM(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        random = np.random.default_rng(1)
        weights = [torch.from_numpy(random.uniform(-1, 1, (size, WIDTH)) / size**0.5) for size in SIZES]
        self.tables = nn.ModuleList(
            nn.EmbeddingBag.from_pretrained(weight, freeze=False, mode="sum", sparse=sparse) for weight in weights
        )
        self.pooling = [torch.from_numpy(random.uniform(0, 1, size)) for size in SIZES]
        pairs = (TABLES + 1) * TABLES // 2
        self.bottom = nn.Sequential(nn.Linear(DENSE, 8), nn.ReLU(), nn.Linear(8, WIDTH), nn.ReLU()).double()
        self.top = nn.Sequential(nn.Linear(WIDTH + pairs, 8), nn.ReLU(), nn.Linear(8, 1), nn.Sigmoid()).double()

    def forward(self, dense: Tensor, offsets: list[Tensor], ids: list[Tensor]) -> Tensor:
        x = self.bottom(dense)
        inputs = zip(self.tables, ids, offsets, self.pooling, strict=True)
        bags = [table(bag, offset, per_sample_weights=weight[bag]) for table, bag, offset, weight in inputs]
        features = torch.stack([x, *bags], 1)
        left, right = torch.tril_indices(TABLES + 1, TABLES + 1, -1)
        dots = (features @ features.transpose(1, 2))[:, left, right]
        return self.top(torch.cat([x, dots], 1)).squeeze(1)


Batch = tuple[Tensor, list[Tensor], list[Tensor], Tensor]


def random_clicks(random: torch.Generator) -> Batch:
    """Bags of 0 to 3 ids for every table, and clicks that mean nothing."""
    lengths = torch.randint(4, (TABLES, BATCH), generator=random)
    offsets = [torch.cat([torch.zeros(1, dtype=torch.long), length.cumsum(0)[:-1]]) for length in lengths]
    ids = [torch.randint(n, (int(k.sum()),), generator=random) for n, k in zip(SIZES, lengths, strict=True)]
    dense = torch.rand(BATCH, DENSE, generator=random, dtype=torch.float64)
    return dense, offsets, ids, torch.randint(2, (BATCH,), generator=random).double()


def train(make: Any, sparse: bool, seen: Seen) -> None:
    model = DLRM(sparse)
    optimizer = make(model, lr=0.01)
    random = torch.Generator().manual_seed(1)
    data = [random_clicks(random) for _ in range(5)]
    for _ in range(7):
        for dense, offsets, ids, clicks in data:
            loss = nn.functional.binary_cross_entropy(model(dense, offsets, ids), clicks)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.after_step(loss.detach(), model, optimizer)


def test_sparse_adam() -> None:
    assert_same_run("DLRM, SparseAdam", train, TorchsTwo, lambda model, lr: SparseAdam(model.parameters(), lr=lr))


def test_deferred_adam() -> None:
    assert_same_as_adam(
        "DLRM, DeferredAdam", train, DeferredAdam, lambda model, lr: torch.optim.Adam(model.parameters(), lr=lr)
    )

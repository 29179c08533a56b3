"""Two towers: a table of users and a table of items, a small network on top of each, and the dot product of both.

A batch's items are each other's negatives (sampled softmax). Popular items are drawn as negatives more often than
others, so the logarithm of an item's share of the data is taken off its score. Only the tables' optimizer differs
between rules; the networks always have torch.optim.Adam with the same learning rate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.quality.interactions import Interactions
from benchmarks.quality.ranking import Ranking, rank
from benchmarks.quality.rules import Rule, state_bytes
from benchmarks.quality.tuning import Outcome, falling_rate

TOWER_RATE = 1e-3

FIRST_WEIGHTS = 0.03  # their standard deviation in the tables

NDCG, HIT_RATE, FULL_NDCG = "ndcg_at_10", "hit_rate_at_10", "ndcg"


@dataclass(frozen=True)
class Shape:
    dim: int
    hidden: int
    batch: int
    epochs: int


class TwoTowers(nn.Module):
    def __init__(self, data: Interactions, shape: Shape) -> None:
        super().__init__()
        self.tables = nn.ModuleList(_table(rows, shape.dim) for rows in (data.users, data.items))
        self.towers = nn.ModuleList(Tower(shape) for _ in self.tables)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """The score of each of the users with each of the items."""
        left, right = (
            tower(table(ids)) for tower, table, ids in zip(self.towers, self.tables, (users, items), strict=True)
        )
        scores: Tensor = left @ right.T
        return scores


def _table(rows: int, dim: int) -> nn.Embedding:
    return nn.Embedding(rows, dim, sparse=True, _weight=FIRST_WEIGHTS * torch.randn(rows, dim))


class Tower(nn.Module):
    """What two layers make of a vector, added to it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(shape.dim, shape.hidden), nn.ReLU(), nn.Linear(shape.hidden, shape.dim))

    def forward(self, vectors: Tensor) -> Tensor:
        added: Tensor = vectors + self.layers(vectors)
        return added


def train(data: Interactions, shape: Shape, rule: Rule, rate: float, seed: int) -> Outcome:
    torch.manual_seed(seed)
    model = TwoTowers(data, shape)
    of_tables = rule.make(list(model.tables.parameters()), rate)
    of_towers = torch.optim.Adam(model.towers.parameters(), lr=TOWER_RATE, fused=True)
    batches, log_share = list(_batches(data, shape)), _log_share(data)
    falling = zip(falling_rate(of_tables, len(batches)), falling_rate(of_towers, len(batches)), strict=True)
    for (users, items), _ in zip(batches, falling, strict=True):
        model.zero_grad()
        _softmax_loss(model(users, items) - log_share[items], items).backward()  # type: ignore[no-untyped-call]
        of_tables.step()
        of_towers.step()
    validation, test = _rankings(model, data)
    figures = {NDCG: test.ndcg, HIT_RATE: test.hit_rate, FULL_NDCG: test.full_ndcg}
    return Outcome(validation.full_ndcg, figures, state_bytes(of_tables))


def _log_share(data: Interactions) -> Tensor:
    return (data.train[:, 1].bincount(minlength=data.items) / len(data.train)).log()


def _batches(data: Interactions, shape: Shape) -> Iterator[Tensor]:
    for _ in range(shape.epochs):
        for batch in torch.randperm(len(data.train)).split(shape.batch):  # type: ignore[no-untyped-call]
            yield data.train[batch].T


def _softmax_loss(scores: Tensor, items: Tensor) -> Tensor:
    """Row and column number n belong together. An item that comes twice is no negative of itself."""
    is_again = (items.unsqueeze(0) == items.unsqueeze(1)).fill_diagonal_(False)
    return nn.functional.cross_entropy(scores.masked_fill(is_again, -torch.inf), torch.arange(len(items)))


@torch.no_grad()
def _rankings(model: TwoTowers, data: Interactions) -> Iterator[Ranking]:
    scores = model(torch.arange(data.users), torch.arange(data.items))
    yield rank(scores, data.validation, data.train)
    yield rank(scores, data.test, torch.cat([data.train, data.validation]))

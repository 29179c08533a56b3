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
from benchmarks.quality.ranking import figures_of, validation_score
from benchmarks.quality.rules import Rule, state_bytes
from benchmarks.quality.training import fit, table
from benchmarks.quality.tuning import Outcome

TOWER_RATE = 1e-3


@dataclass(frozen=True)
class Shape:
    dim: int
    hidden: int
    batch: int
    epochs: int


class TwoTowers(nn.Module):
    def __init__(self, data: Interactions, shape: Shape, *, dense: bool) -> None:
        super().__init__()
        self.tables = nn.ModuleList(table(rows, shape.dim, dense=dense) for rows in (data.users, data.items))
        self.towers = nn.ModuleList(Tower(shape) for _ in self.tables)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """The score of each of the users with each of the items."""
        left, right = (
            tower(table(ids)) for tower, table, ids in zip(self.towers, self.tables, (users, items), strict=True)
        )
        scores: Tensor = left @ right.T
        return scores


class Tower(nn.Module):
    """What two layers make of a vector, added to it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(shape.dim, shape.hidden), nn.ReLU(), nn.Linear(shape.hidden, shape.dim))

    def forward(self, vectors: Tensor) -> Tensor:
        added: Tensor = vectors + self.layers(vectors)
        return added


def train(
    data: Interactions, shape: Shape, rule: Rule, rate: float, seed: int, dtype: torch.dtype = torch.float32
) -> Outcome:
    torch.manual_seed(seed)
    model = TwoTowers(data, shape, dense=rule.dense).to(dtype)
    batches, log_share = list(batches_of(data, shape)), _log_share(data)
    of_tables = rule.make(list(model.tables.parameters()), rate)
    of_towers = torch.optim.Adam(model.towers.parameters(), lr=TOWER_RATE, fused=True)

    def loss(batch: Tensor) -> Tensor:
        users, items = batch
        return _softmax_loss(model(users, items) - log_share[items], items)

    costs = fit(model, loss, batches, of_tables, of_towers)
    with torch.no_grad():
        scores = model(torch.arange(data.users), torch.arange(data.items))
    return Outcome(validation_score(scores, data), figures_of(scores, data) | costs, state_bytes(of_tables))


def _log_share(data: Interactions) -> Tensor:
    return (data.train[:, 1].bincount(minlength=data.items) / len(data.train)).log()


def batches_of(data: Interactions, shape: Shape) -> Iterator[Tensor]:
    for _ in range(shape.epochs):
        for batch in torch.randperm(len(data.train)).split(shape.batch):  # type: ignore[no-untyped-call]
            yield data.train[batch].T


def _softmax_loss(scores: Tensor, items: Tensor) -> Tensor:
    """Row and column number n belong together. An item that comes twice is no negative of itself."""
    is_again = (items.unsqueeze(0) == items.unsqueeze(1)).fill_diagonal_(False)
    return nn.functional.cross_entropy(scores.masked_fill(is_again, -torch.inf), torch.arange(len(items)))

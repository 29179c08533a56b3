"""What is trained on MovieLens: matrix factorisation with BPR, and two towers.

Matrix factorisation: a score is the dot product of a row of users and a row of items. Every interaction is paired with
one item that the user has not met, drawn anew in every epoch, which should have the lower score (Rendle et al., "BPR:
Bayesian personalized ranking from implicit feedback"). There is nothing but the two tables, so all of the training is
in their optimizer.

Two towers: a small network on top of each table, and the dot product of both. A batch's items are each other's
negatives (sampled softmax). Popular items are drawn as negatives more often than others, so the logarithm of an item's
share of the data is taken off its score. The networks always have torch.optim.Adam with the same learning rate.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.contenders import state_bytes
from benchmarks.quality.interactions import Interactions
from benchmarks.quality.ranking import FULL_NDCG, figures_of, rank
from benchmarks.quality.rules import Rule, Settings
from benchmarks.quality.tuning import Outcome, falling_rate

FIRST_WEIGHTS = 0.03  # their standard deviation in the tables
TOWER_RATE = 1e-3

STEP, TRAINING = "milliseconds_per_step_of_tables", "seconds_of_training"


@dataclass(frozen=True)
class Shape:
    dim: int
    batch: int
    epochs: int
    hidden: int = 0  # units of each tower; 0: matrix factorisation, which has none


class Factors(nn.Module):
    def __init__(self, data: Interactions, shape: Shape, *, dense: bool) -> None:
        super().__init__()
        first = [FIRST_WEIGHTS * torch.randn(rows, shape.dim) for rows in (data.users, data.items)]
        tables = [nn.Embedding(len(each), shape.dim, sparse=not dense, _weight=each) for each in first]
        self.tables = nn.ModuleList(tables)
        self.towers = nn.ModuleList()

    def loss(self, batch: Tensor) -> Tensor:
        """Low if each user scores the first item higher than the second."""
        of_users, of_items = self.tables
        pairs = of_items(batch[1:])
        margins = (of_users(batch[0]) * (pairs[0] - pairs[1])).sum(1)
        return -nn.functional.logsigmoid(margins).mean()

    def scores(self) -> Tensor:
        """Of every user with every item."""
        of_users, of_items = self.tables.parameters()
        return of_users @ of_items.T


class TwoTowers(Factors):
    def __init__(self, data: Interactions, shape: Shape, *, dense: bool) -> None:
        super().__init__(data, shape, dense=dense)
        self.towers = nn.ModuleList(
            nn.Sequential(nn.Linear(shape.dim, shape.hidden), nn.ReLU(), nn.Linear(shape.hidden, shape.dim))
            for _ in self.tables
        )
        self.rows = data.users, data.items
        self.log_share = (data.train[:, 1].bincount(minlength=data.items) / len(data.train)).log()

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """The score of each of the users with each of the items. What a tower makes of a vector is added to it."""
        vectors = [table(ids) for table, ids in zip(self.tables, (users, items), strict=True)]
        left, right = (vector + tower(vector) for vector, tower in zip(vectors, self.towers, strict=True))
        scores: Tensor = left @ right.T
        return scores

    def loss(self, batch: Tensor) -> Tensor:
        """Row and column number n belong together. An item that comes twice is no negative of itself."""
        users, items = batch
        scores = self(users, items) - self.log_share[items]
        is_again = (items.unsqueeze(0) == items.unsqueeze(1)).fill_diagonal_(False)
        return nn.functional.cross_entropy(scores.masked_fill(is_again, -torch.inf), torch.arange(len(items)))

    def scores(self) -> Tensor:
        scores: Tensor = self(*map(torch.arange, self.rows))
        return scores


def train(data: Interactions, shape: Shape, rule: Rule, settings: Settings, seed: int) -> Outcome:
    """Once through all batches, with rates that fall to 0.

    Costs are processor time, which a busy machine distorts less than the clock; a training runs on one thread, so on an
    idle machine the two are the same.
    """
    torch.manual_seed(seed)
    model = (TwoTowers if shape.hidden else Factors)(data, shape, dense=rule.dense).to(rule.dtype)
    batches = list(batches_of(data, shape))
    of_tables = rule.optimizer(list(model.tables.parameters()), settings)
    towers = model.towers.parameters()
    others = [torch.optim.Adam(towers, lr=TOWER_RATE, fused=True)] if shape.hidden else []
    falling = zip(*(falling_rate(optimizer, len(batches)) for optimizer in (of_tables, *others)), strict=True)
    stepping, start = 0.0, time.process_time()
    for batch, _ in zip(batches, falling, strict=True):
        model.zero_grad()
        model.loss(batch).backward()  # type: ignore[no-untyped-call]
        before = time.process_time()
        of_tables.step()
        stepping += time.process_time() - before
        for optimizer in others:
            optimizer.step()
    costs = {STEP: 1e3 * stepping / len(batches), TRAINING: time.process_time() - start}
    with torch.no_grad():
        scores = model.scores()
    validation = rank(scores, data.validation, data.train)[FULL_NDCG]
    return Outcome(validation, figures_of(scores, data) | costs, state_bytes(of_tables))


def batches_of(data: Interactions, shape: Shape) -> Iterator[Tensor]:
    """Users and items that they have met; for matrix factorisation also items that they have not."""
    is_met = torch.zeros(data.users, data.items, dtype=torch.bool)
    is_met[data.train[:, 0], data.train[:, 1]] = True
    unmet_first, unmet = is_met.int().argsort(dim=1, stable=True), (~is_met).sum(1)
    for _ in range(shape.epochs):
        users, items = data.train[torch.randperm(len(data.train))].T
        columns = [users, items]
        if not shape.hidden:
            drawn = (torch.rand(len(users), dtype=torch.float64) * unmet[users]).long()
            columns.append(unmet_first[users, drawn])
        yield from torch.stack(columns).split(shape.batch, dim=1)  # type: ignore[no-untyped-call]

"""Matrix factorisation with BPR: of two items, the one that the user has met should have the higher score.

A score is the dot product of a row of users and a row of items. Every interaction is paired with one item that the user
has not met, drawn anew in every epoch (Rendle et al., "BPR: Bayesian personalized ranking from implicit feedback").
There is nothing but the two tables, so all of the training is in their optimizer.
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


@dataclass(frozen=True)
class Shape:
    dim: int
    batch: int
    epochs: int


class Factors(nn.Module):
    def __init__(self, data: Interactions, shape: Shape, *, dense: bool) -> None:
        super().__init__()
        self.users = table(data.users, shape.dim, dense=dense)
        self.items = table(data.items, shape.dim, dense=dense)

    def forward(self, batch: Tensor) -> Tensor:
        """How much higher each user scores the first item than the second."""
        users, pairs = self.users(batch[0]), self.items(batch[1:])
        margins: Tensor = (users * (pairs[0] - pairs[1])).sum(1)
        return margins


def train(
    data: Interactions, shape: Shape, rule: Rule, rate: float, seed: int, dtype: torch.dtype = torch.float32
) -> Outcome:
    torch.manual_seed(seed)
    model = Factors(data, shape, dense=rule.dense).to(dtype)
    batches = list(batches_of(data, shape))
    optimizer = rule.make(list(model.parameters()), rate)
    costs = fit(model, lambda batch: -nn.functional.logsigmoid(model(batch)).mean(), batches, optimizer)
    with torch.no_grad():
        scores = model.users.weight @ model.items.weight.T
    return Outcome(validation_score(scores, data), figures_of(scores, data) | costs, state_bytes(optimizer))


def batches_of(data: Interactions, shape: Shape) -> Iterator[Tensor]:
    """Users, items that they have met, items that they have not."""
    is_met = torch.zeros(data.users, data.items, dtype=torch.bool)
    is_met[data.train[:, 0], data.train[:, 1]] = True
    unmet_first, unmet = is_met.int().argsort(dim=1, stable=True), (~is_met).sum(1)
    for _ in range(shape.epochs):
        users, items = data.train[torch.randperm(len(data.train))].T
        drawn = (torch.rand(len(users), dtype=torch.float64) * unmet[users]).long()
        yield from torch.stack([users, items, unmet_first[users, drawn]]).split(shape.batch, dim=1)  # type: ignore[no-untyped-call]

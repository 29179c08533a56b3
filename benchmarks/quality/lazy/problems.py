"""What is trained: two models on MovieLens-100K, with batches that touch much of the tables, and with small ones."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.quality import factors, towers
from benchmarks.quality.interactions import Interactions
from benchmarks.quality.lazy.contestants import Contestant, Settings
from benchmarks.quality.tuning import Outcome


@dataclass(frozen=True)
class Problem:
    name: str
    title: str
    shape: factors.Shape | towers.Shape

    @property
    def about(self) -> str:
        epochs = f"{self.shape.epochs} epoch{'s' * (self.shape.epochs > 1)}"
        return f"{self.title}, batches of {self.shape.batch:,}, {epochs}"

    def run(self, data: Interactions, contestant: Contestant, settings: Settings, seed: int) -> Outcome:
        rule = contestant.rule(settings)
        if isinstance(self.shape, factors.Shape):
            return factors.train(data, self.shape, rule, settings.rate, seed, contestant.dtype)
        return towers.train(data, self.shape, rule, settings.rate, seed, contestant.dtype)

    def batches(self, data: Interactions) -> Iterable[Tensor]:
        """A row of users; all others are of items."""
        if isinstance(self.shape, factors.Shape):
            return factors.batches_of(data, self.shape)
        return towers.batches_of(data, self.shape)


@dataclass(frozen=True)
class Rarity:
    """How much of the tables a step touches, and how many steps a row waits for its next gradient."""

    steps: int
    share_of_users: float
    share_of_items: float
    gap_of_users: float
    gap_of_tail: float


def rarity(problem: Problem, data: Interactions) -> Rarity:
    torch.manual_seed(0)
    counts = [torch.zeros(rows, dtype=torch.int64) for rows in (data.users, data.items)]
    steps = 0
    for batch in problem.batches(data):
        steps += 1
        for count, ids in zip(counts, (batch[0], batch[1:]), strict=True):
            count[ids.unique()] += 1  # type: ignore[no-untyped-call]
    users, items = counts
    shares = [count.sum().item() / len(count) / steps for count in counts]
    gaps = [
        statistics.median((steps / count.double().clamp(min=1)).tolist()) for count in (users, items[~data.is_head])
    ]
    return Rarity(steps, *shares, *gaps)


BPR, TOWERS = "Matrix factorisation, BPR", "Two towers"
FULL = (
    Problem("bpr-1024", BPR, factors.Shape(dim=64, batch=1_024, epochs=8)),
    Problem("bpr-64", BPR, factors.Shape(dim=64, batch=64, epochs=1)),
    Problem("towers-256", TOWERS, towers.Shape(dim=64, hidden=64, batch=256, epochs=2)),
)


def _quick(problem: Problem) -> Problem:
    shape = problem.shape
    if isinstance(shape, towers.Shape):
        return replace(problem, shape=replace(shape, dim=8, hidden=8, epochs=1))
    return replace(problem, shape=replace(shape, dim=8, epochs=1))


QUICK = tuple(_quick(problem) for problem in FULL)

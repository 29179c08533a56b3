"""Vectors are planted in a table, and a model finds them again from noisy scores; a few rows come often, most are rare.

A score is the dot product of a row with a random direction, plus noise. A direction is ten times longer along its first
dimension than along its last, so the columns of the gradient differ in scale as well as the rows: whoever keeps one
number per row cannot know that. What is reported is the mean squared error of the scores without their noise, over rows
drawn by the same law: of the head, the most frequent rows that make up half of all draws, and of the tail, all other
rows. A score's own variance is 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.cases import popularity
from benchmarks.contenders import state_bytes
from benchmarks.quality.rules import Rule, Settings
from benchmarks.quality.tuning import Outcome, falling_rate

NOISE = 0.5
LONGEST_OVER_SHORTEST = 10
HELD_OUT = 50_000

HEAD, TAIL = "error_of_head", "error_of_tail"


@dataclass(frozen=True)
class Problem:
    rows: int
    dim: int
    batch: int
    steps: int

    @property
    def about(self) -> str:
        return (
            f"{self.rows:,} x {self.dim} table, {self.steps:,} steps of {self.batch} Zipf-distributed rows; "
            f"the head has {self.head:,} rows"
        )

    @property
    def head(self) -> int:
        """The fewest of the frequent rows that make up half of the draws."""
        return 1 + int(popularity(self.rows).searchsorted(0.5))


@dataclass(frozen=True)
class Scored:
    rows: Tensor  # (n,)
    directions: Tensor  # (n, dim)
    scores: Tensor  # (n,)

    def error(self, table: nn.Embedding) -> Tensor:
        return nn.functional.mse_loss((table(self.rows) * self.directions).sum(1), self.scores)


def learn(problem: Problem, rule: Rule, settings: Settings, seed: int) -> Outcome:
    generator = torch.Generator().manual_seed(seed)
    # Of a direction's elements; the mean square of its product with a planted row is 1.
    scales = nn.functional.normalize(torch.logspace(0, 1, problem.dim, base=1 / LONGEST_OVER_SHORTEST), dim=0)
    planted = torch.randn(problem.rows, problem.dim, generator=generator)
    draw = _drawing(planted, scales, generator, seed)
    held_out = draw(HELD_OUT)
    table = nn.Embedding(problem.rows, problem.dim, sparse=True, _weight=torch.zeros_like(planted))
    optimizer = rule.optimizer(list(table.parameters()), settings)
    for _ in falling_rate(optimizer, problem.steps):
        table.zero_grad()
        draw(problem.batch).error(table).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    with torch.no_grad():
        of_rows = ((table.weight - planted) * scales).square().sum(1)  # the mean squared error of every row
        shares = torch.from_numpy(np.diff(popularity(problem.rows), prepend=0))
        parts = {HEAD: slice(None, problem.head), TAIL: slice(problem.head, None)}
        errors = {name: ((shares * of_rows)[part].sum() / shares[part].sum()).item() for name, part in parts.items()}
        return Outcome(-held_out.error(table).item(), errors, state_bytes(optimizer))


def _drawing(planted: Tensor, scales: Tensor, generator: torch.Generator, seed: int) -> Callable[[int], Scored]:
    rng = np.random.default_rng(seed)
    popular = popularity(len(planted))

    def draw(count: int) -> Scored:
        rows = torch.from_numpy(popular.searchsorted(rng.random(count)))
        directions = torch.randn(count, len(scales), generator=generator) * scales
        noise = NOISE * torch.randn(count, generator=generator)
        return Scored(rows, directions, (planted[rows] * directions).sum(1) + noise)

    return draw

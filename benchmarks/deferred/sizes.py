"""What the suite `deferred` measures."""

from __future__ import annotations

import math
from dataclasses import dataclass

from benchmarks.cases import LONG, ZIPF, Case, short
from benchmarks.deferred.factorisation import Problem


@dataclass(frozen=True)
class Pooled:
    """A case with its number of different batches, which is also how many steps it is warmed up for.

    Six batches in turn would make every row wait for at most six steps.
    """

    case: Case
    batches: int

    @property
    def about(self) -> str:
        return f"{self.case.about}, {self.batches} batches"


@dataclass(frozen=True)
class Sizes:
    accuracy: Pooled
    accuracy_steps: int
    sparse: Pooled  # against sparse optimizers
    dense: Pooled  # against dense Adam
    flush: Pooled
    shares: tuple[Pooled, ...]  # more and more of the rows are touched
    problem: Problem


def share_of(rows: int, dim: int, share: float) -> Case:
    """Uniform ids that name so much of the table."""
    return Case(f"{share:.0%}-of-{short(rows)}", rows, dim, round(-math.log(1 - share) * rows))


SHARES = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5)

FULL = Sizes(
    accuracy=Pooled(Case("accuracy", 2_000, 16, 128, zipf=True), 300),
    accuracy_steps=2_000,
    # With a Zipf batch of 65,536 ids, the rarest of a million rows comes every 220 steps.
    sparse=Pooled(ZIPF, 300),
    # A row of 10 million comes every 610 steps, by when its momentum has long ceased to act.
    dense=Pooled(LONG, 600),
    flush=Pooled(ZIPF, 100),
    shares=tuple(Pooled(share_of(250_000, 64, share), 60) for share in SHARES),
    problem=Problem(users=3_000, items=3_000, dim=8, batch=512, steps=3_000),
)
QUICK = Sizes(
    accuracy=Pooled(Case("accuracy", 200, 4, 32, zipf=True), 50),
    accuracy_steps=200,
    sparse=Pooled(Case("zipf-20k", 20_000, 16, 4_096, zipf=True), 30),
    dense=Pooled(Case("uniform-50k", 50_000, 8, 512), 30),
    flush=Pooled(Case("zipf-20k", 20_000, 16, 4_096, zipf=True), 30),
    shares=tuple(Pooled(share_of(10_000, 8, share), 10) for share in (0.05, 0.3)),
    problem=Problem(users=300, items=300, dim=4, batch=64, steps=200),
)

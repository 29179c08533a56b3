"""What the suite `quality` trains."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.quality.planted import Problem
from benchmarks.quality.towers import Shape


@dataclass(frozen=True)
class Sizes:
    shape: Shape
    problem: Problem
    rates: tuple[float, ...]
    tuning_seeds: int  # runs per rule and rate


FULL = Sizes(
    shape=Shape(dim=64, hidden=64, batch=256, epochs=3),
    problem=Problem(rows=20_000, dim=32, batch=512, steps=2_000),
    rates=(0.005, 0.0125, 0.03, 0.08, 0.2, 0.5),
    tuning_seeds=2,
)
QUICK = Sizes(
    shape=Shape(dim=8, hidden=8, batch=512, epochs=1),
    problem=Problem(rows=500, dim=4, batch=64, steps=30),
    rates=(0.02, 0.2),
    tuning_seeds=1,
)

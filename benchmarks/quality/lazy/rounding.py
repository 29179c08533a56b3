"""How far apart two trainings get that differ in rounding only: their tables, after so many steps.

    python -m benchmarks.quality.lazy.rounding [--data recbole-1.2.1-py3-none-any.whl]

One seed, Adam's rate in the middle of the rates that are tried first.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.quality.interactions import DataError, Interactions, movielens
from benchmarks.quality.lazy import RATES
from benchmarks.quality.lazy.findings import FULL
from benchmarks.quality.models import Shape, train
from benchmarks.quality.rules import TWINS, Rule, Settings
from benchmarks.timing import threads

STEPS = (1, 10, 30, 100, 300)
SETTINGS = Settings(RATES[1])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality.lazy.rounding", description=__doc__)
    parser.add_argument("--data", type=Path, help="RecBole's wheel (default: pip downloads it)")
    try:
        data = movielens(parser.parse_args(argv).data)
    except DataError as error:
        print(f"rounding: {error}", file=sys.stderr)
        return 1
    print("| largest difference of a weight |", " | ".join(f"step {step}" for step in STEPS), "|")
    for problem, (about, twins) in itertools.product((FULL[0], FULL[-1]), TWINS.items()):
        with threads(1):
            apart = distances(problem.shape, data, *twins)
        print(f"| {about}; {problem.about} |", " | ".join(f"{apart[step]:.0e}" for step in STEPS), "|", flush=True)
    return 0


def distances(
    shape: Shape, data: Interactions, one: Rule, other: Rule, steps: Collection[int] = STEPS
) -> dict[int, float]:
    first, second = (_tables(shape, data, rule, steps) for rule in (one, other))
    return {step: (first[step] - second[step]).abs().max().item() for step in steps}


def _tables(shape: Shape, data: Interactions, rule: Rule, steps: Collection[int]) -> dict[int, Tensor]:
    """All weights after each of the steps. To look at a table flushes what waits there, which changes no result."""
    taken: dict[int, Tensor] = {}

    def make(tables: Sequence[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
        optimizer, count = rule.make(tables, **options), itertools.count(1)

        def look(*_: object) -> None:
            if (step := next(count)) in steps:
                taken[step] = torch.cat([table.detach().double() for table in tables])

        optimizer.register_step_post_hook(look)
        return optimizer

    train(data, shape, replace(rule, make=make), SETTINGS, seed=0)
    return taken


if __name__ == "__main__":
    sys.exit(main())

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
from benchmarks.quality.lazy.contestants import CONTESTANTS, CONTROLS, TWINS, Contestant, Settings
from benchmarks.quality.lazy.problems import FULL, Problem
from benchmarks.quality.lazy.race import RATES
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
    rules = {rule.name: rule for rule in (*CONTESTANTS, *CONTROLS)}
    print("| largest difference of a weight |", " | ".join(f"step {step}" for step in STEPS), "|")
    for problem, twins in itertools.product((FULL[0], FULL[-1]), TWINS):
        with threads(1):
            apart = distances(problem, data, rules[twins.one], rules[twins.other])
        print(
            f"| {twins.about}; {problem.about} |", " | ".join(f"{apart[step]:.0e}" for step in STEPS), "|", flush=True
        )
    return 0


def distances(
    problem: Problem, data: Interactions, one: Contestant, other: Contestant, steps: Collection[int] = STEPS
) -> dict[int, float]:
    first, second = (_tables(problem, data, contestant, steps) for contestant in (one, other))
    return {step: (first[step] - second[step]).abs().max().item() for step in steps}


def _tables(problem: Problem, data: Interactions, contestant: Contestant, steps: Collection[int]) -> dict[int, Tensor]:
    """All weights after each of the steps. To look at a table flushes what waits there, which changes no result."""
    taken: dict[int, Tensor] = {}

    def make(tables: Sequence[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
        optimizer, count = contestant.make(tables, **options), itertools.count(1)

        def look(*_: object) -> None:
            if (step := next(count)) in steps:
                taken[step] = torch.cat([table.detach().double() for table in tables])

        optimizer.register_step_post_hook(look)
        return optimizer

    problem.run(data, replace(contestant, make=make), SETTINGS, seed=0)
    return taken


if __name__ == "__main__":
    sys.exit(main())

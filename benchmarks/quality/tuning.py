"""A rule gets the learning rate that suits it best on data held out for that, and then runs with many seeds.

All rules have the same rates to choose from and the same seeds. A seed decides the first weights, the order of the data
and its noise, so two rules with one seed are a pair.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from benchmarks.quality.rules import Rule

FIRST_TUNING_SEED = 1_000  # the runs that choose a rate are none of those that are reported


@dataclass(frozen=True)
class Outcome:
    """Of one run."""

    validation: float  # the higher, the better: this chooses the rate
    figures: Mapping[str, float]  # what is reported
    state_bytes_per_weight: float


Trial: TypeAlias = Callable[[Rule, float, int], Outcome]  # of a rate and a seed


@dataclass(frozen=True)
class Figure:
    """One figure of a rule, by seed."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def deviation(self) -> float:
        return statistics.stdev(self.values) if len(self.values) > 1 else 0.0

    @property
    def standard_error(self) -> float:
        return self.deviation / math.sqrt(len(self.values))

    def as_json(self) -> dict[str, Any]:
        return {"mean": self.mean, "std": self.deviation, "min": min(self.values), "all": self.values}


@dataclass(frozen=True)
class Result:
    rule: str
    rate: float
    validation: dict[float, float]  # the mean, by rate
    figures: dict[str, Figure]
    state_bytes_per_weight: float

    @property
    def is_at_edge(self) -> bool:
        """A rate beyond those that were tried might be better."""
        return self.rate in (min(self.validation), max(self.validation))

    def as_json(self) -> dict[str, Any]:
        return {
            "rule": self.rule,
            "learning_rate": self.rate,
            "validation": {f"{rate:g}": score for rate, score in self.validation.items()},
            "state_bytes_per_weight": self.state_bytes_per_weight,
            **{name: figure.as_json() for name, figure in self.figures.items()},
        }


def results(
    rules: Sequence[Rule], trial: Trial, rates: Sequence[float], tuning_seeds: int, seeds: int
) -> Iterator[Result]:
    for rule in rules:
        validation = {rate: _validation(rule, trial, rate, tuning_seeds) for rate in rates}
        rate = max(validation, key=lambda tried: validation[tried])
        runs = [trial(rule, rate, seed) for seed in range(seeds)]
        figures = {name: Figure(tuple(run.figures[name] for run in runs)) for name in runs[0].figures}
        yield Result(rule.name, rate, validation, figures, runs[0].state_bytes_per_weight)


def _validation(rule: Rule, trial: Trial, rate: float, seeds: int) -> float:
    scores = [trial(rule, rate, FIRST_TUNING_SEED + seed).validation for seed in range(seeds)]
    mean = statistics.fmean(scores)
    return mean if math.isfinite(mean) else -math.inf


def falling_rate(optimizer: torch.optim.Optimizer, steps: int) -> Iterator[int]:
    """The numbers of the steps; before each of them the rate falls, on a line that ends at 0."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for step in range(steps):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * (1 - step / steps)
        yield step

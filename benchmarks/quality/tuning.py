"""Every rule gets the settings that suit it best on data held out for that, and then runs with many seeds.

Settings are searched outward: from a few values, beyond the end where the best one lies, until the best has a worse one
on both sides, or until so many steps beyond were taken. That takes one peak for granted. A decoupled weight decay is
searched in the same way after the rate, at the best rate. A seed decides the first weights, the order of the data and
its noise, so two rules with one seed are a pair.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch

from benchmarks.quality.rules import FIRST_DECAY, Rule, Settings

FIRST_TUNING_SEED = 1_000  # the runs that choose settings are none of those that are reported
DECAYS = (FIRST_DECAY / 4, FIRST_DECAY, FIRST_DECAY * 4)


class Outcome(NamedTuple):
    """Of one run."""

    validation: float  # the higher, the better: this chooses the settings
    figures: Mapping[str, float]  # what is reported
    state_bytes_per_weight: float


Trial: TypeAlias = Callable[[Rule, Settings, int], Outcome]  # with a seed
Scores: TypeAlias = dict[float, float]  # the mean on the validation part, by what was tried


@dataclass(frozen=True)
class Search:
    rates: Sequence[float]  # tried first
    beyond: int  # the ends, at most
    seeds: int


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

    @property
    def spread(self) -> str:
        return f"{self.mean:.4f} ± {self.deviation:.4f}"

    def as_json(self) -> dict[str, Any]:
        return {"mean": self.mean, "std": self.deviation, "min": min(self.values), "all": self.values}


@dataclass(frozen=True)
class Tuned:
    settings: Settings
    rates: Scores
    decays: Scores

    @property
    def at_edge(self) -> bool:
        """A value beyond those that were tried might be better."""
        return _is_end(self.settings.rate, self.rates) or _is_end(self.settings.decay, self.decays)

    @property
    def about(self) -> str:
        """A star stands for an end of what was tried."""
        return self.settings.about + "*" * self.at_edge

    @property
    def tried(self) -> str:
        """What was chosen, and between which ends."""
        found = [(self.settings.rate, self.rates), (self.settings.decay, self.decays)]
        return "; ".join(f"{chosen:g} ({min(among):g} to {max(among):g})" for chosen, among in found if among)


@dataclass(frozen=True)
class Entry:
    """What a rule reached."""

    name: str
    like: str | None
    tuned: Tuned
    figures: dict[str, Figure]
    state_bytes_per_weight: float

    @classmethod
    def of(cls, rule: Rule, tuned: Tuned, runs: Sequence[Outcome]) -> Entry:
        figures = {name: Figure(tuple(run.figures[name] for run in runs)) for name in runs[0].figures}
        return cls(rule.name, rule.like, tuned, figures, runs[0].state_bytes_per_weight)

    def as_json(self) -> dict[str, Any]:
        settings = self.tuned.settings
        return {
            "name": self.name,
            "settings_tuned_for": self.like or self.name,
            "learning_rate": settings.rate,
            "weight_decay": settings.decay,
            "validation_by_rate": {str(rate): score for rate, score in sorted(self.tuned.rates.items())},
            "validation_by_decay": {str(decay): score for decay, score in sorted(self.tuned.decays.items())},
            "state_bytes_per_weight": self.state_bytes_per_weight,
            "figures": {name: figure.as_json() for name, figure in self.figures.items()},
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Entry:
        name, whose = found["name"], found["settings_tuned_for"]
        tried = [
            {float(value): float(score) for value, score in found[f"validation_by_{what}"].items()}
            for what in ("rate", "decay")
        ]
        tuned = Tuned(Settings(found["learning_rate"], found["weight_decay"]), *tried)
        figures = {key: Figure(tuple(figure["all"])) for key, figure in found["figures"].items()}
        return cls(name, None if whose == name else whose, tuned, figures, found["state_bytes_per_weight"])


def compete(rules: Sequence[Rule], trial: Trial, search: Search, seeds: int) -> list[Entry]:
    """Rules take turns in every seed, so that a busy machine slows down all of them."""
    tuned: dict[str, Tuned] = {}
    for rule in rules:
        tuned[rule.name] = tuned[rule.like] if rule.like else _tune(rule, trial, search)
    runs: dict[str, list[Outcome]] = {rule.name: [] for rule in rules}
    for seed in range(seeds):
        for rule in rules:
            runs[rule.name].append(trial(rule, tuned[rule.name].settings, seed))
    return [Entry.of(rule, tuned[rule.name], runs[rule.name]) for rule in rules]


def _tune(rule: Rule, trial: Trial, search: Search) -> Tuned:
    def score(settings: Settings) -> float:
        runs = (trial(rule, settings, FIRST_TUNING_SEED + seed) for seed in range(search.seeds))
        mean = statistics.fmean(run.validation for run in runs)
        return mean if math.isfinite(mean) else -math.inf

    rates = outward(lambda rate: score(Settings(rate, FIRST_DECAY * rule.decays)), search.rates, search.beyond)
    rate = _best_of(rates)
    if not rule.decays:
        return Tuned(Settings(rate), rates, {})
    decays = outward(lambda decay: score(Settings(rate, decay)), DECAYS, search.beyond)
    return Tuned(Settings(rate, _best_of(decays)), rates, decays)


def outward(score: Callable[[float], float], first: Sequence[float], beyond: int) -> Scores:
    """The scores of ``first`` and of as many values beyond as it takes for the best to be no end of them."""
    tried, factor = {value: score(value) for value in first}, first[1] / first[0]
    for _ in range(beyond):
        best = _best_of(tried)
        if not _is_end(best, tried):
            break
        further = best * factor if best == max(tried) else best / factor
        tried[further] = score(further)
    return tried


def _best_of(scores: Mapping[float, float]) -> float:
    return max(scores, key=lambda value: scores[value])


def _is_end(value: float, tried: Scores) -> bool:
    return bool(tried) and value in (min(tried), max(tried))


def falling_rate(optimizer: torch.optim.Optimizer, steps: int) -> Iterator[int]:
    """The numbers of the steps; before each of them the rate falls, on a line that ends at 0."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for step in range(steps):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * (1 - step / steps)
        yield step

"""Every contestant gets the settings that suit it best on the validation part, and then runs with many seeds.

Settings are searched outward: from a few values, beyond the end where the best one lies, until the best has a worse one
on both sides. That takes one peak for granted, and no contestant is held back by the end of a grid. A decoupled weight
decay is searched in the same way after the rate, at the best rate.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from benchmarks.quality.lazy.contestants import FIRST_DECAY, Contestant, Settings
from benchmarks.quality.tuning import FIRST_TUNING_SEED, Figure, Outcome

Trial: TypeAlias = Callable[[Contestant, Settings, int], Outcome]  # with a seed
Scores: TypeAlias = dict[float, float]  # the mean on the validation part, by what was tried

RATES = (0.005, 0.01, 0.02)
DECAYS = (FIRST_DECAY / 4, FIRST_DECAY, FIRST_DECAY * 4)
MOST_BEYOND = 6  # the ends


@dataclass(frozen=True)
class Tuned:
    settings: Settings
    rates: Scores
    decays: Scores

    @property
    def at_edge(self) -> bool:
        return _is_end(self.settings.rate, self.rates) or _is_end(self.settings.decay, self.decays)


@dataclass(frozen=True)
class Entry:
    """What a contestant reached."""

    name: str
    like: str | None
    tuned: Tuned
    figures: dict[str, Figure]
    state_bytes_per_weight: float

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


def compete(contestants: Sequence[Contestant], trial: Trial, tuning_seeds: int, seeds: int) -> list[Entry]:
    """Contestants take turns in every seed, so that a busy machine slows down all of them."""
    tuned: dict[str, Tuned] = {}
    for contestant in contestants:
        tuned[contestant.name] = tuned[contestant.like] if contestant.like else tune(contestant, trial, tuning_seeds)
    runs: dict[str, list[Outcome]] = {contestant.name: [] for contestant in contestants}
    for seed in range(seeds):
        for contestant in contestants:
            runs[contestant.name].append(trial(contestant, tuned[contestant.name].settings, seed))
    return [_entry(contestant, tuned[contestant.name], runs[contestant.name]) for contestant in contestants]


def _entry(contestant: Contestant, tuned: Tuned, runs: Sequence[Outcome]) -> Entry:
    figures = {name: Figure(tuple(run.figures[name] for run in runs)) for name in runs[0].figures}
    return Entry(contestant.name, contestant.like, tuned, figures, runs[0].state_bytes_per_weight)


def tune(contestant: Contestant, trial: Trial, seeds: int) -> Tuned:
    def score(settings: Settings) -> float:
        runs = (trial(contestant, settings, FIRST_TUNING_SEED + seed) for seed in range(seeds))
        mean = statistics.fmean(run.validation for run in runs)
        return mean if math.isfinite(mean) else -math.inf

    first_decay = FIRST_DECAY if contestant.decays else 0.0
    rates = search(lambda rate: score(Settings(rate, first_decay)), RATES)
    rate = best_of(rates)
    if not contestant.decays:
        return Tuned(Settings(rate), rates, {})
    decays = search(lambda decay: score(Settings(rate, decay)), DECAYS, {first_decay: rates[rate]})
    return Tuned(Settings(rate, best_of(decays)), rates, decays)


def search(
    score: Callable[[float], float], first: Sequence[float], known: Mapping[float, float] | None = None
) -> Scores:
    """The scores of ``first`` and of as many values beyond as it takes for the best to be no end of them."""
    known, factor = known or {}, first[1] / first[0]
    tried = {value: known[value] if value in known else score(value) for value in first}
    for _ in range(MOST_BEYOND):
        best = best_of(tried)
        if not _is_end(best, tried):
            break
        further = best * factor if best == max(tried) else best / factor
        tried[further] = score(further)
    return tried


def best_of(scores: Mapping[float, float]) -> float:
    return max(scores, key=lambda value: scores[value])


def _is_end(value: float, tried: Iterable[float]) -> bool:
    values = list(tried)
    return bool(values) and value in (min(values), max(values))

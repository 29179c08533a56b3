"""What a suite `lazy` found about one problem, and the bars: DeferredAdam has to be dense Adam, in every seed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.bars import Bar
from benchmarks.quality.comparison import Difference, difference
from benchmarks.quality.lazy.contestants import ADAM, TWINS, Twins
from benchmarks.quality.lazy.problems import Rarity
from benchmarks.quality.lazy.race import Entry
from benchmarks.quality.ranking import FULL_NDCG, HIT_RATE, NDCG, TAIL_FULL_NDCG, TAIL_HIT_RATE, TAIL_NDCG

METRICS = (NDCG, HIT_RATE, FULL_NDCG, TAIL_NDCG, TAIL_HIT_RATE, TAIL_FULL_NDCG)
EQUAL = 1e-4


@dataclass(frozen=True)
class Finding:
    problem: str
    title: str
    about: str
    rarity: Rarity
    entries: Sequence[Entry]

    def entry(self, name: str) -> Entry:
        return next(entry for entry in self.entries if entry.name == name)

    @property
    def adam(self) -> Entry:
        return self.entry(ADAM.name)

    def against_adam(self, entry: Entry, metric: str) -> Difference:
        return difference(entry.figures[metric], self.adam.figures[metric])

    def apart(self, twins: Twins, metric: str) -> float:
        """The largest difference that any seed shows."""
        return difference(self.entry(twins.other).figures[metric], self.entry(twins.one).figures[metric]).largest

    def as_json(self) -> dict[str, Any]:
        return {
            "problem": self.problem,
            "title": self.title,
            "about": self.about,
            "rarity": asdict(self.rarity),
            "entries": [entry.as_json() | {"minus_adam": self._minus_adam(entry)} for entry in self.entries],
            "twins": {twins.about: {name: self.apart(twins, name) for name in METRICS} for twins in TWINS},
        }

    def _minus_adam(self, entry: Entry) -> dict[str, Any]:
        return {metric: self.against_adam(entry, metric).as_json() for metric in METRICS}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Finding:
        entries = [Entry.from_json(entry) for entry in found["entries"]]
        return cls(found["problem"], found["title"], found["about"], Rarity(**found["rarity"]), entries)


def bars(finding: Finding) -> Iterator[Bar]:
    for twins in TWINS[:2]:
        apart = max(finding.apart(twins, metric) for metric in METRICS)
        yield Bar(f"{twins.about}: {finding.about}, any metric, any seed", EQUAL, apart, "")

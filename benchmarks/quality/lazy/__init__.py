"""The suite `lazy`: does a model learn as much if only the rows with a gradient move, and how much less if not?

    python -m benchmarks lazy [--data recbole-1.2.1-py3-none-any.whl] [--repeats SEEDS]

Adam moves every row of a table at every step. "Lazy" or "sparse" Adam leaves rows without a gradient alone. Its tables
and its picture are those of docs/quality.md.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from benchmarks.quality import models
from benchmarks.quality.interactions import Interactions, movielens
from benchmarks.quality.lazy import findings
from benchmarks.quality.lazy.findings import EQUAL, Finding, Problem, rarity
from benchmarks.quality.ranking import METRICS
from benchmarks.quality.rules import BESIDE_ADAM, CONTROLS, TWINS
from benchmarks.quality.tuning import Search, compete
from benchmarks.report import Grid
from benchmarks.suite import Bar, Part, Suite
from benchmarks.timing import threads

RATES = (0.005, 0.01, 0.02)
FULL, QUICK = Search(RATES, beyond=6, seeds=2), Search(RATES, beyond=1, seeds=1)


class LazySuite(Suite):
    file = "lazy"
    own_threads = "trains on one thread"
    usual_repeats, quick_repeats = 10, 2

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.search, self.problems = (QUICK, findings.QUICK) if self.quick else (FULL, findings.FULL)
        self.found: list[Finding] = []

    @functools.cached_property
    def interactions(self) -> Interactions:
        return movielens(self.data)

    def parts(self) -> Iterator[Part]:
        for problem in self.problems:
            yield Part(problem.name, functools.partial(self._run, problem))

    def _run(self, problem: Problem) -> None:
        trial = functools.partial(models.train, self.interactions, problem.shape)
        with threads(1):  # the tables are small: handing work to a second thread costs more than the work
            entries = compete((*BESIDE_ADAM, *CONTROLS), trial, self.search, self.repeats)
        rare = rarity(problem.shape, self.interactions)
        finding = Finding(problem.name, problem.about, rare, entries)
        self.found.append(finding)
        self.findings |= {
            "seeds": self.repeats,
            "tuning_seeds": self.search.seeds,
            "shapes": {each.name: asdict(each.shape) for each in self.problems},
            "problems": [each.as_json() for each in self.found],
        }
        for twins in list(TWINS)[:2]:  # DeferredAdam has to be dense Adam, in every seed
            apart = max(finding.apart(twins, metric) for metric in METRICS)
            self.bars.append(Bar(f"{twins}: {finding.about}, any metric, any seed", EQUAL, apart))

    def tables(self) -> Iterator[Grid | str]:
        for _, grid in findings.grids(self.found):
            yield grid

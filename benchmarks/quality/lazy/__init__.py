"""The suite `lazy`: does a model learn as much if only the rows with a gradient move, and how much less if not?

    python -m benchmarks lazy [--data recbole-1.2.1-py3-none-any.whl] [--repeats SEEDS]
    python -m benchmarks.quality.lazy.page docs/quality.md out/lazy.json

Adam moves every row of a table at every step. "Lazy" or "sparse" Adam leaves rows without a gradient alone. The first
command trains and measures; the second writes its tables and its picture into a page.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from benchmarks.bars import Bar
from benchmarks.quality.interactions import Interactions, movielens
from benchmarks.quality.lazy import plot, problems, report
from benchmarks.quality.lazy.contestants import CONTESTANTS, CONTROLS, Contestant, Settings
from benchmarks.quality.lazy.findings import Finding, bars
from benchmarks.quality.lazy.problems import Problem, rarity
from benchmarks.quality.lazy.race import compete
from benchmarks.quality.tuning import Outcome
from benchmarks.suite import Part, Suite
from benchmarks.timing import threads

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console


class LazySuite(Suite):
    file = "lazy"
    own_threads = "trains on one thread"
    usual_repeats, quick_repeats = 10, 2

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.found: list[Finding] = []

    @property
    def problems(self) -> Sequence[Problem]:
        return problems.QUICK if self.quick else problems.FULL

    @property
    def tuning_seeds(self) -> int:
        return 1 if self.quick else 2

    @functools.cached_property
    def interactions(self) -> Interactions:
        return movielens(self.data)

    def parts(self) -> Iterator[Part]:
        for problem in self.problems:
            yield Part(problem.name, functools.partial(self._run, problem))

    def _run(self, problem: Problem) -> None:
        data = self.interactions

        def trial(contestant: Contestant, settings: Settings, seed: int) -> Outcome:
            return problem.run(data, contestant, settings, seed)

        with threads(1):  # the tables are small: handing work to a second thread costs more than the work
            entries = compete((*CONTESTANTS, *CONTROLS), trial, self.tuning_seeds, self.repeats)
        self.found.append(Finding(problem.name, problem.title, problem.about, rarity(problem, data), entries))

    def bars(self) -> Iterator[Bar]:
        for finding in self.found:
            yield from bars(finding)

    def show(self, console: Console) -> None:
        for finding in self.found:
            console.print(report.shown(finding))
        if self.found:
            console.print(report.shown_twins(self.found))

    def draw(self, figure: Figure) -> bool:
        if self.found:
            plot.draw(figure, self.found)
        return bool(self.found)

    def findings(self) -> dict[str, Any]:
        return {
            "seeds": self.repeats,
            "tuning_seeds": self.tuning_seeds,
            "shapes": {problem.name: asdict(problem.shape) for problem in self.problems},
            "problems": [finding.as_json() for finding in self.found],
        }

"""The suite `quality`: how well a model learns when its tables' optimizer keeps less state.

    python -m benchmarks quality [--data recbole-1.2.1-py3-none-any.whl] [--repeats SEEDS]

MovieLens-100K comes out of RecBole's wheel, which pip downloads unless its path is given.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from benchmarks.bars import Bar
from benchmarks.quality import bars, planted, plot, report, rules, towers
from benchmarks.quality.comparison import ratio
from benchmarks.quality.interactions import movielens
from benchmarks.quality.sizes import FULL, QUICK, Sizes
from benchmarks.quality.tuning import Result, Trial, results
from benchmarks.suite import Part, Suite
from benchmarks.timing import threads

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console


class QualitySuite(Suite):
    file = "quality"
    own_threads = "trains on one thread"
    usual_repeats, quick_repeats = 12, 2

    planted: Sequence[Result] = ()
    movielens: Sequence[Result] = ()

    @property
    def sizes(self) -> Sizes:
        return QUICK if self.quick else FULL

    def parts(self) -> Iterator[Part]:
        yield Part("planted", self._planted)
        yield Part("movielens", self._movielens)

    def _planted(self) -> None:
        self.planted = self._results(functools.partial(planted.learn, self.sizes.problem))

    def _movielens(self) -> None:
        self.movielens = self._results(functools.partial(towers.train, movielens(self.data), self.sizes.shape))

    def _results(self, trial: Trial) -> Sequence[Result]:
        with threads(1):  # the tables are small: handing work to a second thread costs more than the work
            return list(results(rules.RULES, trial, self.sizes.rates, self.sizes.tuning_seeds, self.repeats))

    def bars(self) -> Iterator[Bar]:
        if self.movielens:
            yield from bars.as_good_as_adam(self.movielens)

    def show(self, console: Console) -> None:
        if self.planted:
            console.print(report.planted(self.planted, self.sizes.problem.about))
        if self.movielens:
            console.print(report.movielens(self.movielens))

    def draw(self, figure: Figure) -> bool:
        is_measured = bool(self.planted or self.movielens)
        if is_measured:
            plot.draw(figure, self.planted, self.movielens)
        return is_measured

    def findings(self) -> dict[str, Any]:
        return {
            "seeds": self.repeats,
            "sizes": asdict(self.sizes),
            "planted": _as_json(self.planted),
            "movielens": _as_json(self.movielens),
        }


def _as_json(found: Sequence[Result]) -> list[dict[str, Any]]:
    """Every rule's figures, and their ratios to those of the first."""
    return [
        result.as_json()
        | {
            f"{name}_over_sparse_adam": ratio(figure, found[0].figures[name]).as_json()
            for name, figure in result.figures.items()
        }
        for result in found
    ]

"""The suite `quality`: how well a model learns when its tables' optimizer keeps less state.

    python -m benchmarks quality [--data recbole-1.2.1-py3-none-any.whl] [--repeats SEEDS]

MovieLens-100K comes out of RecBole's wheel, which pip downloads unless its path is given. docs/memory.md has its
picture.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from matplotlib import figure as plt
from matplotlib.axes import Axes

from benchmarks.quality import models, planted, rules
from benchmarks.quality.comparison import ratio
from benchmarks.quality.interactions import movielens
from benchmarks.quality.planted import HEAD, TAIL
from benchmarks.quality.ranking import FULL_NDCG, HIT_RATE, NDCG
from benchmarks.quality.rules import Kind
from benchmarks.quality.tuning import Entry, Figure, Search, Trial, compete
from benchmarks.report import Grid
from benchmarks.suite import Bar, Part, Suite
from benchmarks.timing import threads

LEAST = 0.99  # of Adam's NDCG of the whole list, which chance moves least
COLOURS = {Kind.DENSE: "#1b4d7a", Kind.LAZY: "#1b4d7a", Kind.SMALL: "#f2a65a", Kind.PEER: "#b5525c"}
CAPTION = (
    "Mean ± standard deviation (minimum) over seeds. Below: ratio to SparseAdam's mean, 95% interval by a paired "
    "bootstrap. *: an end of the rates tried."
)


@dataclass(frozen=True)
class Sizes:
    shape: models.Shape
    problem: planted.Problem
    search: Search


FULL = Sizes(
    shape=models.Shape(dim=64, batch=256, epochs=3, hidden=64),
    problem=planted.Problem(rows=20_000, dim=32, batch=512, steps=2_000),
    search=Search(rates=(0.005, 0.0125, 0.03, 0.08, 0.2, 0.5), beyond=0, seeds=2),
)
QUICK = Sizes(
    shape=models.Shape(dim=8, batch=512, epochs=1, hidden=8),
    problem=planted.Problem(rows=500, dim=4, batch=64, steps=30),
    search=Search(rates=(0.02, 0.2), beyond=0, seeds=1),
)


class QualitySuite(Suite):
    file = "quality"
    own_threads = "trains on one thread"
    usual_repeats, quick_repeats = 12, 2

    planted: Sequence[Entry] = ()
    movielens: Sequence[Entry] = ()

    @property
    def sizes(self) -> Sizes:
        return QUICK if self.quick else FULL

    def parts(self) -> Iterator[Part]:
        yield Part("planted", self._planted)
        yield Part("movielens", self._movielens)

    def _planted(self) -> None:
        self.planted = self._entries("planted", functools.partial(planted.learn, self.sizes.problem))

    def _movielens(self) -> None:
        data = movielens(self.data)
        self.movielens = found = self._entries("movielens", functools.partial(models.train, data, self.sizes.shape))
        for entry in found[1:]:
            if entry.name != rules.ADAGRAD.name:
                reached = ratio(entry.figures[FULL_NDCG], found[0].figures[FULL_NDCG]).mean
                what = f"NDCG of {entry.name} over SparseAdam's"
                self.bars.append(Bar(what, 100 * LEAST, 100 * reached, "%", at_least=True))

    def _entries(self, part: str, trial: Trial) -> Sequence[Entry]:
        with threads(1):  # the tables are small: handing work to a second thread costs more than the work
            found = compete(rules.BY_STATE, trial, self.sizes.search, self.repeats)
        over = [{name: ratio(of, found[0].figures[name]) for name, of in entry.figures.items()} for entry in found]
        self.findings |= {"seeds": self.repeats, "sizes": asdict(self.sizes)}
        self.findings[part] = [
            entry.as_json() | {"over_sparse_adam": {name: each._asdict() for name, each in ratios.items()}}
            for entry, ratios in zip(found, over, strict=True)
        ]
        return found

    def tables(self) -> Iterator[Grid | str]:
        if self.planted:
            names = {HEAD: "error of the head", TAIL: "error of the tail"}
            yield _table(f"Planted vectors: {self.sizes.problem.about}", self.planted, names)
        if self.movielens:
            names = {NDCG: "NDCG@10", HIT_RATE: "HR@10", FULL_NDCG: "NDCG of the whole list"}
            yield _table("MovieLens-100K, two towers", self.movielens, names)


def draw(figure: plt.Figure, planted: Sequence[Entry], movielens: Sequence[Entry]) -> None:
    """A line per rule, a panel per figure."""
    panels = [
        ("Planted vectors: error of the head\n(lower is better)", HEAD, planted),
        ("Planted vectors: error of the tail\n(lower is better)", TAIL, planted),
        ("MovieLens-100K: NDCG@10\n(higher is better)", NDCG, movielens),
    ]
    places = figure.subplots(len(panels))  # one below the other, for a phone
    for axes, (title, name, entries) in zip(places, panels, strict=True):
        axes.set_title(title, fontsize=10)
        _draw_panel(axes, [entry.figures[name] for entry in entries])
        axes.set_yticks(range(len(entries)), [entry.name for entry in entries])
        axes.tick_params(axis="y", length=0, labelsize=8)
        axes.invert_yaxis()
    figure.suptitle("Tables trained with less optimizer state:\nmeans over seeds, two standard errors", fontsize=10)


def _table(title: str, entries: Sequence[Entry], names: Mapping[str, str]) -> Grid:
    """A line per rule, with what it keeps, what it reaches, and how SparseAdam, the first, compares."""
    lines = [
        [
            entry.name,
            f"{entry.state_bytes_per_weight:.2f}",
            entry.tuned.about,
            *(_cell(entry.figures[name], entries[0].figures[name]) for name in names),
        ]
        for entry in entries
    ]
    return Grid(title, ["rule of the tables", "bytes\nper weight", "rate", *names.values()], lines, caption=CAPTION)


def _cell(figure: Figure, adam: Figure) -> str:
    found = ratio(figure, adam)
    over = "" if figure is adam else f"{found.mean:.3f} ({found.low:.3f} to {found.high:.3f})"
    return f"{figure.spread} ({min(figure.values):.4f})\n{over}"


def _draw_panel(axes: Axes, figures: Sequence[Figure]) -> None:
    means, errors = [figure.mean for figure in figures], [2 * figure.standard_error for figure in figures]
    colours = [COLOURS[rule.kind] for rule in rules.BY_STATE]
    axes.barh(range(len(means)), means, 0.72, color=colours, xerr=errors, error_kw={"ecolor": "#333333", "capsize": 3})
    for place, (mean, error) in enumerate(zip(means, errors, strict=True)):
        at = (mean + error, place)
        axes.annotate(f"{mean:#.3g}", at, (4, 0), textcoords="offset points", va="center", fontsize=8)
    axes.axvline(means[0], color=COLOURS[Kind.DENSE], linewidth=0.8, linestyle=":")
    axes.set_xlim(0, 1.18 * max(map(sum, zip(means, errors, strict=True))))
    axes.spines[["top", "right"]].set_visible(False)

"""The picture of the suite `quality`: a line per rule, a panel per figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.quality import rules
from benchmarks.quality.planted import HEAD, TAIL
from benchmarks.quality.ranking import NDCG
from benchmarks.quality.tuning import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ALL_STATE, LESS_STATE, PEER = "#1b4d7a", "#f2a65a", "#b5525c"


class Panel(NamedTuple):
    title: str
    name: str
    results: Sequence[Result]


def draw(figure: Figure, planted: Sequence[Result], movielens: Sequence[Result]) -> None:
    panels = [
        Panel("Planted vectors: error of the head\n(lower is better)", HEAD, planted),
        Panel("Planted vectors: error of the tail\n(lower is better)", TAIL, planted),
        Panel("MovieLens-100K: NDCG@10\n(higher is better)", NDCG, movielens),
    ]
    measured = [panel for panel in panels if panel.results]
    figure.set_size_inches(4 * len(measured), 5)
    places = figure.subplots(1, len(measured), squeeze=False, sharey=True)[0]
    for axes, panel in zip(places, measured, strict=True):
        _draw_panel(axes, panel)
    _label_rules(places[0], measured[0].results)
    figure.suptitle("Tables trained with less optimizer state: means over seeds, with two standard errors", fontsize=11)


def _draw_panel(axes: Axes, panel: Panel) -> None:
    figures = [result.figures[panel.name] for result in panel.results]
    means, errors = [figure.mean for figure in figures], [2 * figure.standard_error for figure in figures]
    colours = [_colour(result.rule) for result in panel.results]
    axes.barh(range(len(means)), means, 0.72, color=colours, xerr=errors, error_kw={"ecolor": "#333333", "capsize": 3})
    for place, (mean, error) in enumerate(zip(means, errors, strict=True)):
        axes.annotate(
            f"{mean:#.3g}", (mean + error, place), (4, 0), textcoords="offset points", va="center", fontsize=8
        )
    axes.axvline(means[0], color=ALL_STATE, linewidth=0.8, linestyle=":")
    axes.set_xlim(0, 1.18 * max(map(sum, zip(means, errors, strict=True))))
    axes.set_title(panel.title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)


def _label_rules(axes: Axes, results: Sequence[Result]) -> None:
    axes.set_yticks(
        range(len(results)),
        [f"{result.rule}\n{result.state_bytes_per_weight:.2g} bytes a weight" for result in results],
    )
    axes.tick_params(axis="y", length=0, labelsize=8)
    axes.invert_yaxis()


def _colour(rule: str) -> str:
    if rule == rules.ADAGRAD.name:
        return PEER
    return ALL_STATE if rule in rules.WITH_ALL_STATE else LESS_STATE

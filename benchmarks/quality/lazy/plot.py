"""The picture of the suite `lazy`: how far every rule is from dense Adam, a column per problem."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.quality.lazy.findings import Finding
from benchmarks.quality.ranking import FULL_NDCG, NDCG, TAIL_FULL_NDCG
from benchmarks.quality.rules import ADAM, BESIDE_ADAM, Kind

COLOURS = {Kind.DENSE: "#1b4d7a", Kind.LAZY: "#b5525c", Kind.SMALL: "#f2a65a"}
PANELS = {NDCG: "NDCG@10", FULL_NDCG: "NDCG of the whole list", TAIL_FULL_NDCG: "NDCG of the whole list, tail items"}


def draw(figure: Figure, findings: Sequence[Finding]) -> None:
    figure.set_size_inches(4.2 * len(findings), 11)
    places = figure.subplots(len(PANELS), len(findings), squeeze=False, sharey=True, sharex="row")
    for line, (metric, title) in zip(places, PANELS.items(), strict=True):
        for axes, finding in zip(line, findings, strict=True):
            _draw_panel(axes, finding, metric)
            axes.set_title(f"{finding.about}\n{title}", fontsize=9)
    figure.suptitle(
        "MovieLens-100K: difference from dense Adam over the same seeds, in percent of dense Adam's mean\n"
        "(95% intervals; to the right is better; rates tuned for each rule)",
        fontsize=11,
    )
    _explain(figure)


def _draw_panel(axes: Axes, finding: Finding, metric: str) -> None:
    of_adam = finding.adam.figures[metric].mean
    others = [rule for rule in BESIDE_ADAM if rule is not ADAM]
    axes.axvline(0, color=COLOURS[ADAM.kind], linewidth=0.8)
    for place, rule in enumerate(others):
        found = finding.against_adam(finding.entry(rule.name), metric).over(of_adam / 100)
        around = [[found.mean - found.low], [found.high - found.mean]]
        axes.errorbar(found.mean, place, xerr=around, fmt="o", markersize=4, capsize=3, color=COLOURS[rule.kind])
    axes.set_yticks(range(len(others)), [rule.name for rule in others])
    axes.set_ylim(len(others) - 0.5, -0.5)
    axes.tick_params(labelsize=8)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _explain(figure: Figure) -> None:
    from matplotlib.lines import Line2D

    marks = [Line2D([], [], color=colour, marker="o", markersize=4) for colour in COLOURS.values()]
    labels = [kind.value for kind in COLOURS]
    figure.legend(marks, labels, loc="outside lower center", ncols=len(marks), fontsize=8, frameon=False)

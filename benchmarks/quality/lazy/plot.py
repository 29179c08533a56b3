"""The picture of the suite `lazy`: how far every rule is from dense Adam, a row per problem."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.quality.lazy.findings import Finding
from benchmarks.quality.ranking import NDCG, TAIL_FULL_NDCG
from benchmarks.quality.rules import ADAM, BESIDE_ADAM, Kind

COLOURS = {Kind.DENSE: "#1b4d7a", Kind.LAZY: "#b5525c", Kind.SMALL: "#f2a65a"}
PANELS = {NDCG: "NDCG@10", TAIL_FULL_NDCG: "NDCG of tail items"}


def draw(figure: Figure, findings: Sequence[Finding]) -> None:
    """Two narrow columns, since a phone shows the picture at half of its size."""
    figure.set_size_inches(5.2, 2.7 * len(findings) + 1.4)
    places = figure.subplots(len(findings), len(PANELS), squeeze=False, sharey=True, sharex="col")
    for line, finding in zip(places, findings, strict=True):
        for axes, (metric, title) in zip(line, PANELS.items(), strict=True):
            _draw_panel(axes, finding, metric)
            axes.set_title(f"\n{title}", fontsize=9)  # the empty line is the problem's
        over = ("figure fraction", "axes fraction")
        label = line[0].annotate(finding.about, (0.02, 1), (0, 18), over, "offset points", fontsize=9, weight="bold")
        label.set_in_layout(False)
    figure.suptitle(
        "MovieLens-100K: difference from dense Adam\nin percent of its mean; to the right is better", fontsize=10
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
    axes.tick_params(labelsize=8.5)
    axes.tick_params(axis="x", labelbottom=True)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _explain(figure: Figure) -> None:
    from matplotlib.lines import Line2D

    marks = [Line2D([], [], color=colour, marker="o", markersize=4) for colour in COLOURS.values()]
    labels = [kind.value for kind in COLOURS]
    figure.legend(marks, labels, loc="outside lower center", ncols=1, fontsize=8.5, frameon=False)

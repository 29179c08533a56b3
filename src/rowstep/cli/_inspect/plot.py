"""The histograms as a picture: a line per table, norms of rows on the left and steps taken on the right."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from rowstep.cli._inspect.figures import Histogram
from rowstep.cli._inspect.histograms import Pair
from rowstep.cli._inspect.text import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NORMS, _AGES = "#1b4d7a", "#f2a65a"
_LONGEST_NAME = 40


def draw(figure: Figure, pairs: list[Pair]) -> None:
    figure.set_size_inches(9, 2.8 * len(pairs))
    for pair, (left, right) in zip(pairs, figure.subplots(len(pairs), 2, squeeze=False), strict=True):
        # The font has no sign for every letter, and dollars would begin a formula.
        name = printable(pair.name, _LONGEST_NAME).encode("ascii", "backslashreplace").decode()
        _bars(left, pair.norms, _NORMS, f"norm of a row ({pair.norms_of})", "no numbers to take norms of")
        _bars(
            right, pair.ages, _AGES, "steps a row has taken (row_step)", "the state does not count\nthe steps of rows"
        )
        left.set_title(name, loc="left", parse_math=False)


def _bars(axes: Axes, histogram: Histogram | None, colour: str, label: str, absent: str) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    if histogram is None or not histogram.counts:
        reason = absent if histogram is None else "no finite value above 0"
        axes.text(0.5, 0.5, reason, ha="center", va="center", color="grey", transform=axes.transAxes)
        axes.set_axis_off()
        return
    edges = histogram.edges
    if edges[0] == edges[-1]:  # one value: a bar without width would not be seen
        axes.set_xlim(edges[0] * 0.5, edges[0] * 1.5)
        edges = [edges[0] * 0.98, edges[0] * 1.02]
    if histogram.is_logarithmic:
        axes.set_xscale("log")
    widths = [high - low for low, high in itertools.pairwise(edges)]
    axes.bar(edges[:-1], histogram.counts, widths, align="edge", color=colour, edgecolor="white", linewidth=0.5)
    apart = {"at 0": histogram.not_positive, "NaN or inf": histogram.not_finite}
    notes = [f"{count:,} {what}" for what, count in apart.items() if count]
    axes.set_xlabel(f"{label}\nnot shown: {', '.join(notes)}" if notes else label)
    axes.set_ylabel("rows")
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)

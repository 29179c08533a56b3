"""The pictures: times beside rowstep, and how they grow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from benchmarks.contenders import ROOFLINE, ROWSTEP, TORCH
from benchmarks.peers.report import PEERS, TITLES, Outcome, multiple, outcomes, threads
from benchmarks.peers.sizes import LABELS, ROWS, THREADS
from benchmarks.timing import Measurement

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OURS, SAME_RULE, OTHER_RULE = "#1b4d7a", "#f2a65a", "#c4c9d0"
COLOURS = {ROWSTEP: OURS, TORCH: SAME_RULE, ROOFLINE: "#8a8f98"}
MARKS = {1: "-", 2: "--"}


def draw_peers(figure: Figure, measurements: Sequence[Measurement]) -> None:
    """A panel per case and number of threads: cases side by side, threads below each other."""
    found = {kind: outcomes(kind, measurements) for kind in PEERS}
    rows = [(kind, count) for kind in PEERS for count in sorted({outcome.threads for outcome in found[kind]})]
    columns = max(sum(outcome.threads == count for outcome in found[kind]) for kind, count in rows)
    heights = [len(PEERS[kind]) for kind, _ in rows]
    panels = figure.subplots(len(rows), columns, squeeze=False, height_ratios=heights)
    for (kind, count), line in zip(rows, panels, strict=True):
        shown = [outcome for outcome in found[kind] if outcome.threads == count]
        for number, axes in enumerate(line):
            if number < len(shown):
                _bars(axes, kind, shown[number], named=number == 0)
            else:
                axes.set_axis_off()
    figure.suptitle("Time beside rowstep's (median, logarithmic); orange: the same rule, grey: another")


def _bars(axes: Axes, kind: str, outcome: Outcome, *, named: bool) -> None:
    peers = PEERS[kind][::-1]
    same = PEERS[kind][0].rule
    for place, peer in enumerate(peers):
        entry = outcome.entries.get(peer.name)
        if entry is None:
            axes.text(0, place, " left out" if peer.name in outcome.left_out else "", fontsize=6, va="center",
                      transform=axes.get_yaxis_transform())  # fmt: skip
            continue
        colour = OURS if peer is PEERS[kind][0] else SAME_RULE if peer.rule is same else OTHER_RULE
        time = entry.timing.median * 1e3
        axes.barh(place, time, color=colour)
        label = f"{time:.3g} ms" if peer is PEERS[kind][0] else multiple(entry.by_median)
        axes.text(time, place, f" {label}", fontsize=6, va="center")
    axes.set_xscale("log")
    axes.margins(x=0.25)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_yticks(range(len(peers)), [peer.name for peer in peers] if named else [""] * len(peers), fontsize=7)
    axes.tick_params(axis="x", labelsize=7)
    axes.set_title(f"{TITLES[kind].split(':')[0]}, {threads(outcome.threads)}\n{outcome.about}", fontsize=7, loc="left")
    axes.set_xlabel("ms", fontsize=7)
    axes.spines[["top", "right"]].set_visible(False)


def draw_curves(figure: Figure, measurements: Sequence[Measurement]) -> None:
    axes_shown = [axis for axis in LABELS if any(measured.kind == axis for measured in measurements)]
    columns = min(3, len(axes_shown))
    panels = figure.subplots(-(-len(axes_shown) // columns), columns, squeeze=False).flat
    for axes, axis in zip(panels, axes_shown, strict=False):
        draw_curve(axes, axis, [measured for measured in measurements if measured.kind == axis])
    for axes in list(panels)[len(axes_shown) :]:
        axes.set_axis_off()
    figure.suptitle("Time of one step (median)")


def draw_rows(figure: Figure, measurements: Sequence[Measurement]) -> None:
    """The one for the README."""
    draw_curve(figure.subplots(), ROWS, [measured for measured in measurements if measured.kind == ROWS])


def draw_curve(axes: Axes, axis: str, measurements: Sequence[Measurement]) -> None:
    """A line per contender and number of threads; by threads, a line per contender."""
    counts = [0] if axis == THREADS else sorted({measured.threads for measured in measurements if measured.timings})
    for name, colour in COLOURS.items():
        for number, count in enumerate(counts):
            points = [
                (int(measured.name), measured.timings[name].median * 1e3)
                for measured in measurements
                if name in measured.timings and count in (0, measured.threads)
            ]
            label = name.replace(ROOFLINE, "memory traffic alone") + (f", {threads(count)}" if count else "")
            style = ("-", "--", ":")[number % 3]
            axes.plot(*zip(*points, strict=True), style, color=colour, marker="o", markersize=3, label=label)
    axes.set_xscale("linear" if axis == THREADS else "log")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    if axis == THREADS:
        axes.set_xticks(sorted({int(measured.name) for measured in measurements}))
    axes.set_xlabel(
        f"{LABELS[axis]} ({measurements[0].about.rpartition(', ')[0] or measurements[0].about})", fontsize=8
    )
    axes.set_ylabel("ms", fontsize=8)
    axes.legend(fontsize=6, frameon=False)
    axes.grid(alpha=0.2)
    axes.spines[["top", "right"]].set_visible(False)

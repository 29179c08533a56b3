"""The pictures: how long peers take beside rowstep, and how a step's time grows."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.contenders import ROOFLINE, ROWSTEP, TORCH
from benchmarks.peers.curves import LABELS, THREADS
from benchmarks.peers.report import PEERS, TITLES, Outcome, outcomes
from benchmarks.report import multiple, threads
from benchmarks.timing import Measurement

OURS, SAME_RULE, OTHER_RULE = "#1b4d7a", "#e07b1a", "#8a8f98"
COLOURS = {ROWSTEP: OURS, TORCH: SAME_RULE, ROOFLINE: OTHER_RULE}
NAMES = {ROOFLINE: "memory traffic alone"}
STYLES = ("-", "--", ":")  # by the number of threads


def draw_peers(figure: Figure, measurements: Sequence[Measurement], kind: str) -> None:
    """A panel per case, one below the other: a phone shows the picture at its full size."""
    cases: dict[str, list[Outcome]] = {}
    for outcome in outcomes(kind, measurements):
        cases.setdefault(outcome.about, []).append(outcome)
    for axes, (about, found) in zip(figure.subplots(len(cases), squeeze=False).flat, cases.items(), strict=True):
        _beside(axes, kind, found)
        axes.set_title(about, fontsize=9, loc="left", x=-0.4)
    figure.suptitle(
        f"{TITLES[kind].split(':')[0]}: how many times as long as rowstep (medians).\n"
        "Orange: the same rule, grey: another. Filled: one thread, open: more",
        fontsize=9,
    )


def _beside(axes: Axes, kind: str, found: Sequence[Outcome]) -> None:
    """A point per peer and number of threads."""
    first, *others = PEERS[kind]
    peers = others[::-1]
    for place, peer in enumerate(peers):
        colour = SAME_RULE if peer.rule is first.rule else OTHER_RULE
        measured = [outcome for outcome in found if peer.name in outcome.entries]
        for outcome in measured:
            filled = colour if outcome.threads == 1 else "none"
            axes.plot(outcome.entries[peer.name].by_median, place, "o", color=colour, markerfacecolor=filled)
        ratios = ", ".join(multiple(outcome.entries[peer.name].by_median) for outcome in measured)
        shown = ratios or "left out" * any(peer.name in outcome.left_out for outcome in found)
        axes.text(1, place, shown, transform=axes.get_yaxis_transform(), va="center", ha="right", fontsize=8)
    axes.axvline(1, color=OURS, linewidth=1)
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, 0.5), high * (high / min(low, 0.5)) ** 0.5)  # room for the figures
    axes.locator_params(axis="x", numticks=4)
    axes.xaxis.set_major_formatter("{x:,.7g}x")
    axes.xaxis.set_minor_formatter("")
    axes.set_yticks(range(len(peers)), [peer.name for peer in peers], fontsize=8.5)
    axes.set_ylim(-0.6, len(peers) - 0.4)
    axes.tick_params(axis="x", labelsize=8)
    axes.grid(alpha=0.2)
    axes.spines[["top", "right"]].set_visible(False)


def draw_curves(figure: Figure, measurements: Sequence[Measurement]) -> None:
    """A panel per axis, one below the other for a phone, and the legend above."""
    shown = [axis for axis in LABELS if any(measured.kind == axis for measured in measurements)]
    panels = list(figure.subplots(len(shown), squeeze=False).flat)
    for axes, axis in zip(panels, shown, strict=True):
        _curve(axes, axis, [measured for measured in measurements if measured.kind == axis])
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside upper center",
        ncols=2,
        fontsize=8.5,
        frameon=False,
        title="Time of one step (median)",
    )


def _curve(axes: Axes, axis: str, measurements: Sequence[Measurement]) -> None:
    """A line per contender and number of threads; by threads, a line per contender."""
    counts = [0] if axis == THREADS else sorted({measured.threads for measured in measurements if measured.timings})
    for name, colour in COLOURS.items():
        for number, count in enumerate(counts):
            points = [
                (int(measured.name), measured.timings[name].median * 1e3)
                for measured in measurements
                if name in measured.timings and count in (0, measured.threads)
            ]
            label = NAMES.get(name, name) + (f", {threads(count)}" if count else "")
            style = STYLES[number % len(STYLES)]
            axes.plot(*zip(*points, strict=True), style, color=colour, marker="o", markersize=3, label=label)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("")
    about = measurements[0].about
    if axis == THREADS:
        axes.set_xticks(sorted({int(measured.name) for measured in measurements}))
    else:
        axes.set_xscale("log")
        about = about.rpartition(", ")[0]  # without the point
    axes.set_xlabel(f"{LABELS[axis]} ({about})", fontsize=9)
    axes.set_ylabel("ms", fontsize=9)
    axes.tick_params(labelsize=8.5)
    axes.grid(alpha=0.2)
    axes.spines[["top", "right"]].set_visible(False)

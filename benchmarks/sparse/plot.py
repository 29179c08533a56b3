"""The bar chart of the suite `sparse`: one panel per thread count, one group of bars per case."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.contenders import ADAM, ROOFLINE, ROWSTEP, TORCH
from benchmarks.timing import Measurement

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {ROOFLINE: "#c4c9d0", ROWSTEP: "#1b4d7a", TORCH: "#f2a65a", ADAM: "#b5525c"}


def draw_steps(figure: Figure, measurements: list[Measurement]) -> None:
    counts = sorted({measured.threads for measured in measurements})
    panels = figure.subplots(len(counts), squeeze=False, sharex=True)[:, 0]
    for axes, count in zip(panels, counts, strict=True):
        _panel(axes, [measured for measured in measurements if measured.threads == count])
        axes.set_title(f"{count} thread{'s' * (count > 1)}", loc="left", fontsize=10)
    figure.suptitle("Time of one optimizer step (median, logarithmic)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(COLOURS), frameon=False)


def _panel(axes: Axes, measurements: list[Measurement]) -> None:
    width = 0.8 / len(COLOURS)
    for place, (name, colour) in enumerate(COLOURS.items()):
        at = [i + (place - 1.5) * width for i, measured in enumerate(measurements) if name in measured.timings]
        times = [measured.timings[name].median * 1e3 for measured in measurements if name in measured.timings]
        drawn = axes.bar(at, times, width * 0.92, label=name, color=colour)
        axes.bar_label(drawn, labels=[f"{time:.3g}" for time in times], fontsize=7, padding=1)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.margins(y=0.12)
    axes.set_ylabel("ms")
    axes.set_xticks(range(len(measurements)), [measured.about.replace(", ", ",\n") for measured in measurements])
    axes.tick_params(axis="x", length=0, labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)

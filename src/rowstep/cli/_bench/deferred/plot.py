"""The picture of `rowstep bench deferred`: three loss curves, two of which are one, and how far they are apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rowstep.cli._bench.deferred.factorisation import DEFERRED, DENSE, LEARNING_RATE, SPARSE, Curves

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {DENSE: "#f2a65a", DEFERRED: "#1b4d7a", SPARSE: "#b5525c"}


def draw_curves(figure: Figure, curves: Curves) -> None:
    losses, distances = figure.subplots(2, sharex=True, height_ratios=[2.2, 1])
    for axes in (losses, distances):
        axes.set_yscale("log")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    _draw_losses(losses, curves)
    _draw_distances(distances, curves)
    figure.suptitle(
        "DeferredAdam learns rare rows as dense Adam does: held-out loss of three optimizers,\n"
        f"same batches, same learning rate ({LEARNING_RATE:g}); {curves.about}",
        fontsize=11,
    )


def _draw_losses(axes: Axes, curves: Curves) -> None:
    # Two curves coincide; dense Adam's is a wide band below, so that both are seen.
    for name, width in ((DENSE, 7), (DEFERRED, 1.5), (SPARSE, 1.5)):
        axes.plot(curves.steps, curves.losses[name], color=COLOURS[name], linewidth=width, label=name)
    middle = len(curves.steps) // 2
    for name, text, up in ((SPARSE, SPARSE, 1), (DENSE, f"{DENSE}\nand {DEFERRED}", -1)):
        point = curves.steps[middle], curves.losses[name][middle]
        side = {"ha": "left", "va": "bottom"} if up > 0 else {"ha": "right", "va": "top"}
        colour = COLOURS[SPARSE if name == SPARSE else DEFERRED]
        axes.annotate(text, point, (8 * up, 6 * up), textcoords="offset points", color=colour, **side)
    ticks = [5 * 10.0**power for power in range(-6, 1)] + [2 * 10.0**power for power in range(-6, 1)]
    low, high = axes.get_ylim()
    axes.set_yticks([tick for tick in ticks if low < tick < high], minor=True)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.set_ylabel("held-out loss (mean square)\nall users and items alike")
    axes.legend(frameon=False)


def _draw_distances(axes: Axes, curves: Curves) -> None:
    for name in (DEFERRED, SPARSE):
        # No distance at all, as at the start, has no place on a logarithmic axis.
        points = [(step, far) for step, far in zip(curves.steps, curves.distances(name), strict=True) if far > 0]
        if not points:
            continue
        axes.plot(*zip(*points, strict=True), color=COLOURS[name], linewidth=1.5)
        label = f"{name}: at most {max(far for _, far in points):.1g}"
        axes.annotate(
            label, points[-1], (0, 9), textcoords="offset points", color=COLOURS[name], ha="right", va="bottom"
        )
    axes.margins(y=0.25)
    axes.set_ylabel("distance to\ndense Adam's loss")
    axes.set_xlabel("step")

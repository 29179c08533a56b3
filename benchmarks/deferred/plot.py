"""The picture of the suite `deferred`: three loss curves, two of which are one, and how far they are apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.deferred.factorisation import DEFERRED, DENSE, LEARNING_RATE, SPARSE, Curves

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
    step = curves.steps[middle]
    _label(axes, SPARSE, SPARSE, (step, curves.losses[SPARSE][middle]), (8, 6))
    _label(axes, DEFERRED, f"{DENSE}\nand {DEFERRED}", (step, curves.losses[DEFERRED][middle]), (-8, -6))
    low, high = axes.get_ylim()
    between = [digit * 10.0**power for power in range(-9, 2) for digit in (2, 5)]
    axes.set_yticks([tick for tick in between if low < tick < high], minor=True)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.set_ylabel("held-out loss (mean square)\nall users and items alike")
    axes.legend(frameon=False)


def _draw_distances(axes: Axes, curves: Curves) -> None:
    for name in (DEFERRED, SPARSE):
        # No distance at all, as at the start, has no place on a logarithmic axis.
        points = [(step, far) for step, far in zip(curves.steps, curves.distances(name), strict=True) if far > 0]
        if points:
            steps, distances = zip(*points, strict=True)
            axes.plot(steps, distances, color=COLOURS[name], linewidth=1.5)
            _label(axes, name, f"{name}: at most {max(distances):.1g}", points[-1], (-1, 9))
    axes.margins(y=0.25)
    axes.set_ylabel("distance to\ndense Adam's loss")
    axes.set_xlabel("step")


def _label(axes: Axes, name: str, text: str, point: tuple[float, float], away: tuple[int, int]) -> None:
    """Write next to a curve, in its colour; `away` are points to the right and up."""
    right, up = away
    axes.annotate(
        text,
        point,
        away,
        textcoords="offset points",
        color=COLOURS[name],
        ha="left" if right > 0 else "right",
        va="bottom" if up > 0 else "top",
    )

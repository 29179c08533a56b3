"""The suite `rows`: when rows pay. Steps and whole loops of dense Adam and of optimizers of rows, over the rows of the
table at one batch, and over the share of the rows that a batch touches at five sizes of the table.

    python -m benchmarks rows          on an idle machine some minutes, and 20 GB of memory

DeferredAdam's step includes the catch-up before its rows are read. Dense Adam's step is given its gradient; in the
whole loop, the backward pass makes it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks import cases
from benchmarks.cases import POOL, Case, short
from benchmarks.contenders import ADAM, ROWSTEP, TORCH, check_agreement, looper, stepper, touch_state
from benchmarks.deferred import DEFERRED, beside_dense
from benchmarks.report import LOOP, Grid, milliseconds, threads, times
from benchmarks.suite import Part, Suite
from benchmarks.timing import Contender, Measurement
from rowstep import SparseAdam

COUNTS = (1_000, 10_000, 30_000, 100_000, 1_000_000)
SHARES = (0.001, 0.01, 0.05, 0.1, 0.2, 0.5, 1.0)
FULL = [Case(f"{rows}", rows, 32, 16_384) for power in (4, 5, 6) for rows in (10**power, 3 * 10**power)]
FULL.append(Case("10000000", 10_000_000, 32, 16_384))
QUICK = [Case("1000", 1_000, 8, 256), Case("10000", 10_000, 8, 256)]


def share_of(rows: int, dim: int, share: float) -> Case:
    waits = min(600, max(POOL, round(1 / share)))
    return Case(f"{share:g} of {rows}", rows, dim, max(1, round(share * rows)), distinct=True, batches=waits)


FULL_SHARES = [[share_of(rows, 32, share) for share in SHARES] for rows in COUNTS]
QUICK_SHARES = [[share_of(1_000, 8, share) for share in (0.1, 1.0)]]

NAMES = {
    ADAM: "torch Adam, dense",
    TORCH: "torch SparseAdam",
    DEFERRED: "rowstep DeferredAdam",
    ROWSTEP: "rowstep SparseAdam",
}
# On a light page and on a dark one.
COLOURS = [
    dict(zip(NAMES, colours, strict=True))
    for colours in (("#b5525c", "#e07b1a", "#2f8fb3", "#1b4d7a"), ("#e5828c", "#f2a65a", "#5fc0e4", "#a9cdf0"))
]
PANELS = {"step": "One step", "loop": "Whole loop"}


class RowsSuite(Suite):
    file = "rows"

    def parts(self) -> Iterator[Part]:
        for case in QUICK if self.quick else FULL:
            yield Part(short(case.rows), functools.partial(self._by_rows, case))
        for shares in QUICK_SHARES if self.quick else FULL_SHARES:
            yield Part(f"shares-{short(shares[0].rows)}", functools.partial(self._by_share, shares))

    def _by_rows(self, case: Case) -> None:
        for kind, lineup in zip(("step", "loop"), _four(case), strict=True):
            for _ in self.measure(kind, case, lineup):
                pass

    def _by_share(self, shares: Sequence[Case]) -> None:
        for case in shares:
            for kind, lineup in zip(("step of a share", "loop of a share"), beside_dense(case), strict=True):
                for _ in self.measure(kind, case, lineup):
                    pass

    def tables(self) -> Iterator[Grid | str]:
        ratios = {f"Adam/\n{name}": (ADAM, name) for name in (DEFERRED, ROWSTEP)}
        for kind, title in (("step", "One step"), ("loop", LOOP)):
            if measured := self.of_kind(kind):
                yield times(f"{title}, by rows of the table", measured, tuple(NAMES), ratios)
            if measured := self.of_kind(f"{kind} of a share"):
                yield times(
                    f"{title}, by share of the rows", measured, (DEFERRED, ADAM), {"Adam/\nDeferred": (ADAM, DEFERRED)}
                )


def _four(case: Case) -> tuple[list[Contender], list[Contender]]:
    """Steps and whole loops of both pairs, which agree: our SparseAdam and torch's, DeferredAdam and dense Adam."""
    pool = cases.gradients(case)
    pair = {ROWSTEP: SparseAdam(cases.parameters(case)), TORCH: torch.optim.SparseAdam(cases.parameters(case))}
    steps = [stepper(name, optimizer, pool) for name, optimizer in pair.items()]
    for contender in steps:
        contender.warm_up(3)
    check_agreement(case.name, *pair.values())
    for optimizer in pair.values():
        touch_state(optimizer)
    loops = [looper(name, optimizer, pool) for name, optimizer in pair.items()]
    # So many batches that rows wait as long as in training; after 600 steps their momentum has long ceased to act.
    waits = min(600, max(POOL, math.ceil(case.rows / case.ids)))
    of_dense = beside_dense(replace(case, batches=waits))
    return steps + of_dense[0], loops + of_dense[1]


def draw(figure: Figure, measurements: Sequence[Measurement], *, dark: bool = False) -> None:
    """On the fewest threads measured: steps on the left, whole loops on the right, with names at the ends of lines."""
    for axes, (kind, title) in zip(figure.subplots(1, 2, sharey=True), PANELS.items(), strict=True):
        shown = [measured for measured in measurements if measured.kind == kind]
        fewest = min(measured.threads for measured in shown)
        shown = [measured for measured in shown if measured.threads == fewest]
        _panel(axes, shown, COLOURS[dark])
        axes.set_title(f"{title}, ms on {threads(fewest)}", fontsize=10, loc="left")
    _, _, about = shown[0].about.partition(" x ")
    figure.supxlabel(f"rows of the table (width {about} a step)", fontsize=10)


def _panel(axes: Axes, shown: Sequence[Measurement], colours: Mapping[str, str]) -> None:
    taken = {name: [measured.timings[name].median * 1e3 for measured in shown] for name in NAMES}
    # A label takes a sixth of the height. It goes up where it would touch the one below it.
    apart = (max(map(max, taken.values())) / min(map(min, taken.values()))) ** (1 / 6)
    at = 0.0
    for name in sorted(NAMES, key=lambda name: taken[name][-1]):
        at = max(taken[name][-1], at * apart)
        axes.plot([int(measured.name) for measured in shown], taken[name], "-o", color=colours[name], markersize=3.5)
        label = f"{NAMES[name]}\n{milliseconds(shown[-1].timings[name].median)} ms"
        place = int(shown[-1].name), at
        axes.annotate(label, place, (7, 0), textcoords="offset points", va="center", color=colours[name], fontsize=9)
    axes.set(xscale="log", yscale="log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)

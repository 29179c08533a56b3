"""The suite `rows`: time of a step against the rows of the table, for dense Adam and for optimizers of rows.

    python -m benchmarks rows          measures; on an idle machine a few minutes and 16 GB of memory
    python -m benchmarks.rows          puts out/rows.json into the README and docs/index.md, with its picture

DeferredAdam's time includes the catch-up before the rows are read. Dense Adam is given its gradient: making one, which
takes longer than the step, is not counted. The paragraph says so.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks import pages
from benchmarks.cases import POOL, Case, short
from benchmarks.contenders import ADAM, ROWSTEP, TORCH, touch_state
from benchmarks.deferred import DEFERRED, agreeing_pair, deferred_stepper
from benchmarks.peers.curves import Point
from benchmarks.report import Grid, milliseconds, multiple, threads, times
from benchmarks.suite import Part, Suite
from benchmarks.timing import Contender, Measurement, nothing

FULL = [Case(f"{rows}", rows, 32, 16_384) for power in (4, 5, 6) for rows in (10**power, 3 * 10**power)]
FULL.append(Case("10000000", 10_000_000, 32, 16_384))
QUICK = [Case("1000", 1_000, 8, 256), Case("10000", 10_000, 8, 256)]

ROOT = Path(__file__).parents[1]
ABOUT = "Time of a step against the rows of the table"
PAGES = {"README.md": f"![{ABOUT}](docs/scaling-rows.png)", "docs/index.md": f"![{ABOUT}](scaling-rows.png)"}
DATA = "docs/scaling-rows.json"  # its picture is beside it
SIZE = 5, 3.8  # inches; a phone shows the picture at about half of its pixels
NAMES = {
    ADAM: "torch Adam, dense",
    TORCH: "torch SparseAdam",
    DEFERRED: "rowstep DeferredAdam",
    ROWSTEP: "rowstep SparseAdam",
}
COLOURS = dict(zip(NAMES, ("#b5525c", "#e07b1a", "#2f8fb3", "#1b4d7a"), strict=True))


class RowsSuite(Suite):
    file = "rows"

    def parts(self) -> Iterator[Part]:
        for case in QUICK if self.quick else FULL:
            yield Part(short(case.rows), functools.partial(self._measure, case))

    def _measure(self, case: Case) -> None:
        for _ in self.measure("rows", case, _lineup(case)):
            pass

    def tables(self) -> Iterator[Grid | str]:
        ratios = {f"Adam/\n{name}": (ADAM, name) for name in (DEFERRED, ROWSTEP)}
        yield times("One step by rows of the table", self.measurements, tuple(NAMES), ratios)

    def draw(self, figure: Figure) -> bool:
        figure.set_size_inches(*SIZE)
        draw(figure, self.measurements)
        return True


def _lineup(case: Case) -> list[Contender]:
    """Each pair has led to the same weights: our SparseAdam and torch's, DeferredAdam and dense Adam."""
    sparse = Point(case, 0)
    # So many batches that rows wait as long as in training; after 600 steps their momentum has long ceased to act.
    waiting = replace(case, batches=min(600, max(POOL, math.ceil(case.rows / case.ids))))
    deferred, dense, pool = agreeing_pair(waiting)
    steps = deferred_stepper(deferred, pool)
    steps.warm_up(waiting.batches)
    touch_state(dense)
    return [*sparse.contenders(1)[:2], steps, Contender(ADAM, nothing, dense.step)]


# What the pages have


def draw(figure: Figure, measurements: Sequence[Measurement]) -> None:
    """On the fewest threads measured, with each name at the end of its line: a phone shows no legend beside it."""
    shown = _on_fewest_threads(measurements)
    axes = figure.subplots()
    taken = {name: [measured.timings[name].median * 1e3 for measured in shown] for name in COLOURS}
    # A label takes an eighth of the height. It goes up where it would touch the one below it.
    apart = (max(map(max, taken.values())) / min(map(min, taken.values()))) ** (1 / 8)
    at = 0.0
    for name in sorted(COLOURS, key=lambda name: taken[name][-1]):
        at = max(taken[name][-1], at * apart)
        axes.plot([int(measured.name) for measured in shown], taken[name], "-o", color=COLOURS[name], markersize=3.5)
        label = f"{NAMES[name]}\n{milliseconds(shown[-1].timings[name].median)} ms"
        place = int(shown[-1].name), at
        axes.annotate(label, place, (7, 0), textcoords="offset points", va="center", color=COLOURS[name])
    axes.set(xscale="log", yscale="log", xlabel="rows of the table")
    axes.set_title(f"ms per step, {_about(shown)}", fontsize=10, loc="left")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def sentences(measurements: Sequence[Measurement]) -> str:
    """What the picture shows, for the paragraph below it."""
    shown = _on_fewest_threads(measurements)
    first, last = shown[0], shown[-1]
    of = {name: milliseconds(last.timings[name].median) for name in NAMES}
    ratio = {name: multiple(last.ratio(ADAM, name) or 0) for name in NAMES}
    grown = {name: multiple(last.timings[name].median / first.timings[name].median) for name in NAMES}
    text = (
        f"At {last.about.replace(', ', ' with ', 1)} on {threads(last.threads)}, dense Adam's step takes "
        f"{of[ADAM]} ms without making its gradient, `DeferredAdam`'s {of[DEFERRED]} ({ratio[DEFERRED]} faster) and "
        f"`SparseAdam`'s {of[ROWSTEP]} ({ratio[ROWSTEP]} faster). Dense Adam reads and writes the whole table: from "
        f"{_rows(first)} to {_rows(last)} rows its time grows {grown[ADAM]}. `SparseAdam`'s grows "
        f"{grown[ROWSTEP]}, because fewer of its rows are in the CPU's cache."
    )
    if small := [measured for measured in shown if (measured.ratio(DEFERRED, ADAM) or 0) > 1]:
        text += f" Up to {_rows(small[-1])} rows, dense Adam is faster than `DeferredAdam`."
    return textwrap.fill(text, 120, break_on_hyphens=False)


def blocks(measurements: Sequence[Measurement]) -> dict[str, str]:
    """What each page has of a run: the picture and the paragraph below it."""
    return {page: f"{picture}\n\n{sentences(measurements)}" for page, picture in PAGES.items()}


def _rows(measured: Measurement) -> str:
    return short(int(measured.name))


def _on_fewest_threads(measurements: Sequence[Measurement]) -> list[Measurement]:
    fewest = min(measured.threads for measured in measurements)
    return [measured for measured in measurements if measured.threads == fewest]


def _about(shown: Sequence[Measurement]) -> str:
    _, _, about = shown[0].about.partition(" x ")
    return f"width {about}, {threads(shown[0].threads)}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rows", description="Write the picture of the README.")
    parser.add_argument("measured", nargs="?", type=Path, default=Path("out/rows.json"))
    parser.add_argument("--root", type=Path, default=ROOT, help="of the repository")
    given = parser.parse_args(argv)
    document = json.loads(given.measured.read_text())
    if document["quick"]:
        print(f"{given.measured}: the run is a quick one, whose figures mean nothing: measure again", file=sys.stderr)
        return 1
    measurements = [Measurement.from_json(measured) for measured in document["measurements"]]
    for page, block in blocks(measurements).items():
        text = (given.root / page).read_text()
        (given.root / page).write_text(pages.fill(text, {"rows": block}))
    data = given.root / DATA
    data.write_text(json.dumps(document, separators=(",", ":")) + "\n")
    draw(figure := pages.figure(*SIZE), measurements)
    figure.savefig(data.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())

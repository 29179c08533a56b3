"""The suite itself: cases of the step and of the whole loop for each number of threads, and the curves."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from benchmarks.cases import LONG, MANY, TINY_MANY, TINY_ZIPF, UNIFORM, ZIPF, Case
from benchmarks.peers import catalogue, curves, measures, report
from benchmarks.peers.catalogue import FBGEMM_LOOP, ROWSTEP, ROWSTEP_LOOP, Rule
from benchmarks.peers.curves import DUPLICATES, IDS, ROWS, THREADS, WIDTH, Curve
from benchmarks.peers.process import Crew
from benchmarks.report import Grid
from benchmarks.suite import Part, Suite
from benchmarks.timing import Measurement

FASTER = 1.0  # than every peer with the same rule
FASTER_THAN_BEST = 2.0  # at 1M x 64, with one thread
LOOP = 1.5  # than FBGEMM's row-wise Adagrad


class Sizes(NamedTuple):
    steps: Sequence[Case]
    loops: Sequence[Case]
    curves: Sequence[Curve]


def _powers(base: int, first: int, last: int) -> tuple[int, ...]:
    return tuple(base**exponent for exponent in range(first, last + 1))


FULL = Sizes(
    steps=(ZIPF, UNIFORM, LONG, MANY),
    loops=(
        Case("bags-zipf-1m", 1_000_000, 64, 65_536, zipf=True, bag=16),
        Case("bags-uniform-1m", 1_000_000, 64, 65_536, bag=16),
        Case("bags-26-tables", 100_000, 16, 2_048, bag=1, tables=26),
        Case("bags-8-tables", 1_000_000, 32, 20_480, bag=20, tables=8),
    ),
    curves=(
        # Narrow, so that 10^8 rows with both moments take 9.6 GB.
        Curve(ROWS, "width 8, 16,384 uniform ids", Case("rows", 0, 8, 16_384), _powers(10, 4, 8)),
        Curve(IDS, "1M x 32, uniform ids", Case("ids", 1_000_000, 32, 0), _powers(4, 4, 10)),
        Curve(WIDTH, "1M rows, 16,384 uniform ids", Case("width", 1_000_000, 0, 16_384), _powers(2, 2, 8)),
        Curve(DUPLICATES, "1M x 64, 65,536 ids", Case("duplicates", 1_000_000, 64, 65_536), _powers(4, 0, 5)),
        Curve(THREADS, "1M x 64, 65,536 uniform ids", UNIFORM, ()),
    ),
)
QUICK = Sizes(
    steps=(TINY_ZIPF, TINY_MANY),
    loops=(
        Case("bags-zipf-20k", 20_000, 16, 2_048, zipf=True, bag=8),
        Case("bags-3-tables", 5_000, 16, 512, bag=1, tables=3),
    ),
    curves=(
        Curve(ROWS, "width 8, 2,048 uniform ids", Case("rows", 0, 8, 2_048), (1_000, 10_000)),
        Curve(IDS, "20k x 16, uniform ids", Case("ids", 20_000, 16, 0), (256, 1_024)),
        Curve(WIDTH, "20k rows, 2,048 uniform ids", Case("width", 20_000, 0, 2_048), (4, 16)),
        Curve(DUPLICATES, "20k x 16, 2,048 ids", Case("duplicates", 20_000, 16, 2_048), (1, 4)),
        Curve(THREADS, "20k x 16, 2,048 uniform ids", Case("threads", 20_000, 16, 2_048), ()),
    ),
)


class PeersSuite(Suite):
    file = "peers"
    usual_repeats, quick_repeats = 15, 2

    crew: Crew | None = None

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.sizes = QUICK if self.quick else FULL
        self.findings |= {"versions": {}, "missing": {}}  # of peers, by name

    def parts(self) -> Iterator[Part]:
        """A case's part comes once for each number of threads: workers keep theirs, and stay for the next case."""
        for kind, cases in (("step", self.sizes.steps), ("loop", self.sizes.loops)):
            for count in self.threads:
                for case in cases:
                    yield Part(case.name, functools.partial(self._case, kind, case, count))
        for curve in self.sizes.curves:
            yield Part(f"by-{curve.axis}", functools.partial(self._curve, curve))

    def _case(self, kind: str, case: Case, count: int) -> None:
        if self.crew is None or (self.crew.kind, self.crew.threads) != (kind, count):
            self.close()
            self.crew = Crew(kind, count, **self.findings)
        peers = catalogue.STEPS if kind == "step" else catalogue.LOOPS
        for measured in measures.measure(kind, case, peers, self.crew, self.repeats):
            self.measurements.append(measured)
            self.expect(measured)

    def _curve(self, curve: Curve) -> None:
        self.close()  # their memory is needed
        self.measurements += curves.measured(curve, self.threads, self.repeats)

    def close(self) -> None:
        if self.crew is not None:
            self.crew.end()
            self.crew = None

    def expect(self, measured: Measurement) -> None:
        if measured.kind == "loop":
            pair = ROWSTEP_LOOP.name, FBGEMM_LOOP.name
            self.expect_faster(f"whole loop vs {FBGEMM_LOOP.name}", measured, *pair, LOOP)
            return
        same_rule = (peer.name for peer in catalogue.STEPS if peer.rule is Rule.LAZY and peer is not ROWSTEP)
        beside = [name for name in same_rule if name in measured.timings]
        for name in beside:
            self.expect_faster(f"step vs {name}", measured, ROWSTEP.name, name, FASTER)
        if beside and measured.threads == 1 and measured.name in (ZIPF.name, UNIFORM.name):
            best = min(beside, key=lambda name: measured.timings[name].median)
            self.expect_faster(f"step vs the best of them, {best}", measured, ROWSTEP.name, best, FASTER_THAN_BEST)

    def tables(self) -> Iterator[Grid | str]:
        yield from report.grids(self.measurements).values()
        for kind in report.PEERS:
            yield from report.left_out(kind, self.measurements)

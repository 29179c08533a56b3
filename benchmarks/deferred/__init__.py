"""The suite `deferred`: rowstep.DeferredAdam against dense Adam, whose result it gives, and sparse optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from benchmarks.bars import Bar
from benchmarks.deferred import accuracy, bars, factorisation, measures, plot, report
from benchmarks.deferred.sizes import FULL, QUICK, Sizes
from benchmarks.suite import Part, Suite
from benchmarks.timing import Measurement

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console


class DeferredSuite(Suite):
    file = "deferred"

    accuracy: accuracy.Accuracy | None = None
    curves: factorisation.Curves | None = None

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.shares: list[tuple[float, Measurement]] = []

    @property
    def sizes(self) -> Sizes:
        return QUICK if self.quick else FULL

    def parts(self) -> Iterator[Part]:
        sizes = self.sizes
        yield Part("accuracy", self._check)
        yield Part("curves", self._curves)
        yield self._timed(sizes.sparse.case.name, lambda: measures.against_sparse(sizes.sparse, *self._how))
        yield self._timed(sizes.dense.case.name, lambda: measures.against_dense(sizes.dense, *self._how))
        yield self._timed("flush", lambda: measures.flush(sizes.flush, *self._how))
        yield self._timed("shares", self._shares)

    def _timed(self, name: str, measure: Callable[[], Iterator[Measurement]]) -> Part:
        def run() -> None:
            self._check()
            self.measurements += measure()

        return Part(name, run)

    def _check(self) -> None:
        if self.accuracy is None:
            sizes = self.sizes
            self.accuracy = accuracy.compare(sizes.accuracy.case, sizes.accuracy.batches, sizes.accuracy_steps)
        self.accuracy.check()

    def _curves(self) -> None:
        self.curves = factorisation.learn(self.sizes.problem)

    def _shares(self) -> Iterator[Measurement]:
        for share, measured in measures.shares(self.sizes.shares, *self._how):
            self.shares.append((share, measured))
            yield measured

    @property
    def _how(self) -> tuple[Sequence[int], int]:
        return self.threads, self.repeats

    def bars(self) -> Iterator[Bar]:
        if self.accuracy:
            yield from bars.accurate(self.accuracy)
        for measured in self.measurements:
            yield from bars.timed(measured)

    def show(self, console: Console) -> None:
        for table in report.steps(self.of_kind("step", "share")):
            console.print(table)
        if self.shares:
            console.print(*map(report.break_even, measures.break_evens(self.shares)), sep="\n")
        if flushes := self.of_kind("flush"):
            console.print(report.flushes(flushes))
        if self.accuracy:
            console.print(report.accuracy(self.accuracy))
        if self.curves:
            console.print(report.curves(self.curves))

    def draw(self, figure: Figure) -> bool:
        if self.curves:
            plot.draw_curves(figure, self.curves)
        return self.curves is not None

    def findings(self) -> dict[str, Any]:
        return {
            "accuracy": asdict(self.accuracy) if self.accuracy else None,
            "break_even": [asdict(found) for found in measures.break_evens(self.shares)],
            "curves": asdict(self.curves) if self.curves else None,
        }

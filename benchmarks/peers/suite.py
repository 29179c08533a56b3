"""The suite itself: cases of the step and of the whole loop for each number of threads, and the curves."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.bars import Bar
from benchmarks.cases import Case
from benchmarks.peers import bars, catalogue, curves, measures, pages, plot, report
from benchmarks.peers.crew import Crew
from benchmarks.peers.sizes import FULL, QUICK, Bags, Curve, Sizes
from benchmarks.suite import Part, Suite

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console


class PeersSuite(Suite):
    file = "peers"
    usual_repeats = 15
    quick_repeats = 2

    crew: Crew | None = None

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.versions: dict[str, dict[str, str]] = {}
        self.missing: dict[str, str] = {}

    @property
    def sizes(self) -> Sizes:
        return QUICK if self.quick else FULL

    def parts(self) -> Iterator[Part]:
        """A case's part comes once for each number of threads: workers keep theirs, and stay for the next case."""
        for kind, cases in (("step", self.sizes.steps), ("loop", self.sizes.loops)):
            for count in self.threads:
                for case in cases:
                    yield Part(case.name, functools.partial(self._case, kind, case, count))
        for curve in self.sizes.curves:
            yield Part(f"by-{curve.axis}", functools.partial(self._curve, curve))

    def _case(self, kind: str, case: Case | Bags, count: int) -> None:
        peers = catalogue.STEPS if kind == "step" else catalogue.LOOPS
        self.measurements += measures.measure(kind, case, peers, self._crew_for(kind, count), self.repeats)

    def _crew_for(self, kind: str, count: int) -> Crew:
        if self.crew is None or (self.crew.kind, self.crew.threads) != (kind, count):
            self.close()
            self.crew = Crew(kind, count, self.versions, self.missing)
        return self.crew

    def _curve(self, curve: Curve) -> None:
        self.close()  # their memory is needed
        self.measurements += curves.measured(curve, self.threads, self.repeats)

    def close(self) -> None:
        if self.crew is not None:
            self.crew.end()
            self.crew = None

    def bars(self) -> Iterator[Bar]:
        yield from bars.reached(self.measurements)

    def show(self, console: Console) -> None:
        for grid in report.grids(self.measurements):
            console.print(grid.table())
        for sentence in report.all_left_out(self.measurements):
            console.print(sentence, soft_wrap=True)

    def draw(self, figure: Figure) -> bool:
        """The peers, or the curves if there is nothing else; `benchmarks.peers.docs` draws both."""
        if compared := self.of_kind("step", "loop"):
            plot.draw_peers(figure, compared)
        elif self.measurements:
            plot.draw_curves(figure, self.measurements)
        return bool(self.measurements)

    def findings(self) -> dict[str, Any]:
        return {"versions": self.versions, "missing": self.missing}

    def write(self, folder: Path, document: dict[str, Any]) -> list[Path]:
        page = folder / "peers.md"
        page.write_text(pages.whole(document))
        return [page]

"""What every suite has: parts that can be run on their own, what they measured, and bars that it is to reach."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from benchmarks.cases import Case
from benchmarks.report import Grid, threads
from benchmarks.timing import Contender, Measurement, measure
from benchmarks.timing import threads as use_threads


class Part(NamedTuple):
    """A piece of the suite that can be run on its own; the suite keeps what it measured."""

    name: str
    run: Callable[[], None]


class Bar(NamedTuple):
    """What rowstep is to reach, and whether this run reached it."""

    measure: str
    limit: float
    reached: float
    unit: str = ""
    at_least: bool = False
    disturbed: bool = False  # other work took part of the machine: neither met nor missed

    @property
    def met(self) -> bool:
        return self.reached >= self.limit if self.at_least else self.reached <= self.limit


class Suite(abc.ABC):
    """One suite's settings, and what it has measured so far."""

    file: ClassVar[str]  # what its JSON is called
    own_threads: ClassVar[str] = ""  # why it does not measure with the numbers of threads that are asked for
    usual_repeats: ClassVar[int] = 25
    quick_repeats: ClassVar[int] = 5

    def __init__(self, *, quick: bool, threads: Sequence[int], repeats: int, data: Path | None = None) -> None:
        self.quick, self.threads, self.repeats, self.data = quick, threads, repeats, data
        self.measurements: list[Measurement] = []
        self.findings: dict[str, Any] = {}  # for the JSON file: what was found besides the measurements
        self.bars: list[Bar] = []  # they are set for the full sizes; a quick run does not report them

    @staticmethod
    def unavailable() -> str:
        """Why the suite cannot measure anything on this machine, in a sentence; empty if it can."""
        return ""

    @abc.abstractmethod
    def parts(self) -> Iterator[Part]:
        """In the order in which they run."""

    @abc.abstractmethod
    def tables(self) -> Iterator[Grid | str]:
        """What was measured."""

    def close(self) -> None:  # noqa: B027  # most suites start nothing
        """End what the suite has started."""

    def measure(
        self, kind: str, case: Case, lineup: Sequence[Contender], about: str = "", repeats: int = 0
    ) -> Iterator[Measurement]:
        """A measurement for each number of threads."""
        for count in self.threads:
            with use_threads(count):
                measured = measure(kind, case.name, about or case.about, lineup, repeats or self.repeats)
            self.measurements.append(measured)
            yield measured

    def of_kind(self, *kinds: str) -> list[Measurement]:
        return [measured for measured in self.measurements if measured.kind in kinds]

    def expect_faster(self, what: str, measured: Measurement, ours: str, theirs: str, at_least: float) -> None:
        """`ours` is to be so many times faster; nothing if one of them did not take part."""
        self._expect(what, measured, (theirs, ours), at_least, is_least=True)

    def expect_at_most(self, what: str, measured: Measurement, ours: str, theirs: str, at_most: float) -> None:
        """`ours` may take so many times as long; nothing if one of them did not take part."""
        self._expect(what, measured, (ours, theirs), at_most, is_least=False)

    def _expect(self, what: str, measured: Measurement, pair: tuple[str, str], limit: float, *, is_least: bool) -> None:
        if (ratio := measured.ratio(*pair)) is not None:
            where = f"{measured.about}, {threads(measured.threads)}"
            self.bars.append(Bar(f"{what}: {where}", limit, ratio, "x", is_least, measured.disturbed))


def table_of_bars(bars: Sequence[Bar]) -> Grid:
    def line(bar: Bar) -> list[str]:
        limit = f"{'at least' if bar.at_least else 'at most'} {bar.limit:g}{bar.unit}"
        figure = f"{bar.reached:.2f}" if bar.reached >= 0.01 else f"{bar.reached:.1e}" if bar.reached else "0"
        verdict = "disturbed" if bar.disturbed else "[green]yes[/green]" if bar.met else "[red]no[/red]"
        return [bar.measure, limit, figure + bar.unit, verdict]

    return Grid("Bars", ["measure", "bar", "reached", ""], [line(bar) for bar in bars])

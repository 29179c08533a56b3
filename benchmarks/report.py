"""Tables, made once and shown on the screen or as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rich.console import Console
from rich.table import Table

from benchmarks.timing import Measurement, Timing

LOOP = "Whole loop: lookup, backward pass and step"

Ratios: TypeAlias = Mapping[str, tuple[str, str]]  # what is over each column, and the two whose ratio is in it


def console() -> Console:
    screen = Console()
    # Without a terminal rich takes 80 columns for granted, and tables in log files would wrap.
    return screen if screen.is_terminal else Console(width=150)


@dataclass(frozen=True)
class Grid:
    title: str
    headings: Sequence[str]
    lines: Sequence[Sequence[str]]
    words: int = 1  # columns that hold words, not numbers
    caption: str = ""

    def markdown(self) -> str:
        rule = ["---"] * self.words + ["---:"] * (len(self.headings) - self.words)
        heading, *lines = (f"| {' | '.join(cells)} |" for cells in (self.headings, *self.lines))
        return "\n".join([heading, f"|{'|'.join(rule)}|", *lines])

    def table(self) -> Table:
        table = Table(*self.headings[: self.words], title=self.title, caption=self.caption or None)
        for heading in self.headings[self.words :]:
            table.add_column(heading, justify="right")
        for line in self.lines:
            table.add_row(*line, end_section=any("\n" in cell for cell in line))
        return table


def times(title: str, measurements: Sequence[Measurement], names: Sequence[str], ratios: Ratios) -> Grid:
    """A line per measurement, with a column per contender."""
    lines = [
        [
            measured.about + " *" * measured.disturbed,
            str(measured.threads),
            *(time(measured.timings[name]) if name in measured.timings else "" for name in names),
            *("" if (found := measured.ratio(*pair)) is None else multiple(found) for pair in ratios.values()),
        ]
        for measured in measurements
    ]
    headings = ["case", "threads", *(name.replace(" ", "\n", 1) for name in names), *ratios]
    return Grid(f"{title}: median (min) in ms", headings, lines, caption="Ratios are of the medians.")


def time(timing: Timing) -> str:
    return f"{milliseconds(timing.median)} ({milliseconds(timing.min)})"


def milliseconds(seconds: float) -> str:
    """Three digits that count."""
    time = seconds * 1e3
    return f"{time:,.{0 if time >= 100 else 1 if time >= 10 else 2 if time >= 1 else 3}f}"


def multiple(ratio: float) -> str:
    return f"{ratio:,.0f}x" if ratio >= 100 else f"{ratio:.1f}x" if ratio >= 2 else f"{ratio:.2f}x"


def threads(count: int) -> str:
    return f"{count} thread{'s' * (count > 1)}"

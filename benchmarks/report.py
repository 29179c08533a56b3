"""The tables that suites share: times side by side, and the bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from benchmarks.bars import Bar
from benchmarks.timing import Measurement

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

Ratios: TypeAlias = Mapping[str, tuple[str, str]]  # what is over each column, and the two whose ratio is in it


def times(title: str, measurements: Sequence[Measurement], names: Sequence[str], ratios: Ratios) -> Table:
    """A line per measurement, with a column per contender."""
    table = table_of_numbers(
        [*("case", "threads"), *(name.replace(" ", "\n", 1) for name in names), *ratios],
        title=f"{title}: median (min) in ms",
        caption="Ratios are of the medians.",
    )
    for measured in measurements:
        shown = [multiple(measured.ratio(*pair)) for pair in ratios.values()]
        table.add_row(about(measured), str(measured.threads), *(time(measured, name) for name in names), *shown)
    return table


def table_of_numbers(headings: Sequence[str], *, title: str, caption: str | None = None, words: int = 1) -> Table:
    """A table whose first columns hold words, and the others numbers."""
    from rich.table import Table

    table = Table(*headings[:words], title=title, caption=caption)
    for heading in headings[words:]:
        table.add_column(heading, justify="right")
    return table


def show_bars(console: Console, reached: Sequence[Bar], measurements: Sequence[Measurement]) -> None:
    if reached:
        table = table_of_numbers(["measure", "bar", "reached", ""], title="Bars")
        for bar in reached:
            limit = f"{'at least' if bar.at_least else 'at most'} {bar.limit:g}{bar.unit}"
            verdict = "disturbed" if bar.disturbed else "[green]yes[/green]" if bar.met else "[red]no[/red]"
            figure = f"{bar.reached:.2f}" if bar.reached >= 0.01 else f"{bar.reached:.1e}" if bar.reached else "0"
            table.add_row(bar.measure, limit, figure + bar.unit, verdict)
        console.print(table)
    if disturbed := [measured for measured in measurements if measured.disturbed]:
        worst = max(measured.others for measured in disturbed)
        console.print(
            f"[red]* Other work took up to {worst:.0%} of the machine during {len(disturbed)} of "
            f"{len(measurements)} measurements: measure these again.[/red]"
        )


def about(measured: Measurement) -> str:
    return measured.about + "[red] *[/red]" * measured.disturbed


def time(measured: Measurement, name: str) -> str:
    if name not in measured.timings:
        return measured.left_out.get(name, "")
    timing = measured.timings[name]
    return f"{_digits(timing.median * 1e3)} ({_digits(timing.min * 1e3)})"


def _digits(milliseconds: float) -> str:
    """Three digits that count."""
    decimals = 0 if milliseconds >= 100 else 1 if milliseconds >= 10 else 2 if milliseconds >= 1 else 3
    return f"{milliseconds:,.{decimals}f}"


def multiple(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}x"

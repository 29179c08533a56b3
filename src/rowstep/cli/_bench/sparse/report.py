"""The tables of `rowstep bench`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rowstep.cli._bench.bars import Bar
from rowstep.cli._bench.cases import short
from rowstep.cli._bench.contenders import ADAM, ROOFLINE, ROWSTEP, TORCH
from rowstep.cli._bench.results import Results
from rowstep.cli._bench.timing import Measurement

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def show(console: Console, results: Results, reached: list[Bar]) -> None:
    if steps := results.of_kind("step"):
        console.print(_steps(steps))
    if results.state_bytes_per_weight is not None:
        console.print(f"State kept by rowstep: {results.state_bytes_per_weight:.2f} bytes per weight.")
    if others := [measured for measured in results.measurements if measured.kind != "step"]:
        console.print(_others(others))
    if results.memory:
        console.print(_memory(results))
    if results.first_step:
        cold, cached = results.first_step.cold, results.first_step.cached
        console.print(f"First step of a fresh interpreter: {cold:.2f} s, and {cached:.2f} s with the kernels cached.")
    if reached:
        console.print(_bars(reached))
    if disturbed := [measured for measured in results.measurements if measured.disturbed]:
        worst = max(measured.others for measured in disturbed)
        console.print(
            f"[red]* Other work took up to {worst:.0%} of the machine during {len(disturbed)} of "
            f"{len(results.measurements)} measurements: measure these again.[/red]"
        )


def _steps(measurements: list[Measurement]) -> Table:
    from rich.table import Table

    names = (ROWSTEP, TORCH, ADAM, ROOFLINE)
    table = Table(title="One step: median (min) in ms", caption="Ratios are of the medians.")
    table.add_column("case")
    for heading in (
        "threads",
        *(name.replace(" ", "\n", 1) for name in names),
        "torch/\nrowstep",
        "rowstep/\nroofline",
        "Adam/\nrowstep",
    ):
        table.add_column(heading, justify="right")
    for measured in measurements:
        times = [_time(measured, name) for name in names]
        ratios = [_times(measured.ratio(*pair)) for pair in ((TORCH, ROWSTEP), (ROWSTEP, ROOFLINE), (ADAM, ROWSTEP))]
        table.add_row(_about(measured), str(measured.threads), *times, *ratios)
    return table


def _others(measurements: list[Measurement]) -> Table:
    from rich.table import Table

    headings = {"scaling": "more rows", "loop": "whole loop", "dense": "dense parameters"}
    table = Table("", "case", title="More measurements: median (min) in ms")
    for heading in ("threads", "A", "B", "B / A"):
        table.add_column(heading, justify="right")
    for measured in measurements:
        first, second = measured.timings
        times = [f"{name} {_time(measured, name)}" for name in (first, second)]
        ratio = _times(measured.ratio(second, first))
        table.add_row(headings[measured.kind], _about(measured), str(measured.threads), *times, ratio)
    return table


def _memory(results: Results) -> Table:
    from rich.table import Table

    table = Table(title="Peak extra memory of a step, bytes per id")
    for heading in ("rows in the table", ROWSTEP, TORCH):
        table.add_column(heading, justify="right")
    for peak in results.memory:
        table.add_row(short(peak.rows), f"{peak.rowstep:,.1f}", f"{peak.torch:,.1f}")
    return table


def _bars(reached: list[Bar]) -> Table:
    from rich.table import Table

    table = Table("measure", title="Bars")
    for heading in ("bar", "reached", ""):
        table.add_column(heading, justify="right")
    for bar in reached:
        limit = f"{'at least' if bar.at_least else 'at most'} {bar.limit:g}{bar.unit}"
        verdict = "disturbed" if bar.disturbed else "[green]yes[/green]" if bar.met else "[red]no[/red]"
        table.add_row(bar.measure, limit, f"{bar.reached:.2f}{bar.unit}", verdict)
    return table


def _about(measured: Measurement) -> str:
    return measured.about + "[red] *[/red]" * measured.disturbed


def _time(measured: Measurement, name: str) -> str:
    if name not in measured.timings:
        return measured.left_out.get(name, "")
    timing = measured.timings[name]
    return f"{_digits(timing.median * 1e3)} ({_digits(timing.min * 1e3)})"


def _digits(milliseconds: float) -> str:
    """Three digits that count."""
    decimals = 0 if milliseconds >= 100 else 1 if milliseconds >= 10 else 2 if milliseconds >= 1 else 3
    return f"{milliseconds:,.{decimals}f}"


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}x"

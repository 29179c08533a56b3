"""The tables of the suite `sparse`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from benchmarks.cases import short
from benchmarks.contenders import ADAM, ROOFLINE, ROWSTEP, TORCH
from benchmarks.report import about, multiple, table_of_numbers, time, times
from benchmarks.sparse.fresh import PeakMemory
from benchmarks.timing import Measurement

if TYPE_CHECKING:
    from rich.table import Table

OTHER_KINDS = {"scaling": "more rows", "loop": "whole loop", "dense": "dense parameters"}

_RATIOS = {
    "torch/\nrowstep": (TORCH, ROWSTEP),
    "rowstep/\nroofline": (ROWSTEP, ROOFLINE),
    "Adam/\nrowstep": (ADAM, ROWSTEP),
}


def steps(measurements: Sequence[Measurement]) -> Table:
    return times("One step", measurements, (ROWSTEP, TORCH, ADAM, ROOFLINE), _RATIOS)


def others(measurements: Sequence[Measurement]) -> Table:
    headings = ["", "case", "threads", "A", "B", "B / A"]
    table = table_of_numbers(headings, title="More measurements: median (min) in ms", words=2)
    for measured in measurements:
        first, second = measured.timings
        pair = [f"{name} {time(measured, name)}" for name in (first, second)]
        ratio = multiple(measured.ratio(second, first))
        table.add_row(OTHER_KINDS[measured.kind], about(measured), str(measured.threads), *pair, ratio)
    return table


def memory(peaks: Sequence[PeakMemory]) -> Table:
    headings = ["rows in the table", ROWSTEP, TORCH]
    table = table_of_numbers(headings, title="Peak extra memory of a step, bytes per id", words=0)
    for peak in peaks:
        table.add_row(short(peak.rows), f"{peak.rowstep:,.1f}", f"{peak.torch:,.1f}")
    return table

"""The table of `rowstep bench`."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable
from statistics import median

import torch
from rich.table import Table

from rowstep.cli._bench.measure import Line

CAPTION = (
    "torch: SparseAdam, and Adam (fused) beside DeferredAdam. Adam's dense gradient is made before the clock starts; "
    "DeferredAdam's time includes the catch-up of the batch's rows. Ratios are of the medians.\n"
    "On a busy machine these times mean nothing, least of all those of several threads."
)


def table(lines: Iterable[Line]) -> Table:
    title = f"One step: median (min) in ms; torch {torch.__version__}, {os.cpu_count()} cores"
    shown = Table("optimizer", "table, Zipf ids per step", title=title, caption=CAPTION)
    for heading in ("threads", "rounds", "rowstep", "torch", "torch / rowstep"):
        shown.add_column(heading, justify="right")
    for name, group in itertools.groupby(lines, lambda line: line.name):
        for line in group:
            times = [f"{_digits(median(taken))} ({_digits(min(taken))})" for taken in (line.ours, line.theirs)]
            ratio = median(line.theirs) / median(line.ours)
            shown.add_row(name, str(line.size), str(line.threads), str(len(line.ours)), *times, f"{ratio:.1f}x")
        shown.add_section()
    return shown


def _digits(seconds: float) -> str:
    """Milliseconds, with three digits that count."""
    milliseconds = seconds * 1e3
    return f"{milliseconds:,.{max(0, 2 - math.floor(math.log10(milliseconds)))}f}"

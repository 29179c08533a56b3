"""`rowstep bench`: a step of rowstep's optimizers beside torch's, on the user's machine, in about a minute.

The two of a pair take turns, so that a machine that slows down for a second slows both. The rest of the measurements,
with plots and what each should reach, is in `benchmarks/` in the repository.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rowstep import DeferredAdam, SparseAdam
from rowstep.cli import extras

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

SPARSE, DEFERRED = "SparseAdam", "DeferredAdam"
ROUNDS = 5  # at least, where a step takes long
CHECKED_STEPS = 3
LARGEST_DIFFERENCE = 1e-6  # a thousandth of a step; weights below 1 are rounded to 6e-8
# In a long training rows have waited before they are read again; a table that is new would have nothing to catch up.
WAITED_STEPS = 100
CAPTION = (
    "torch: SparseAdam, and Adam (fused) beside DeferredAdam. Adam's dense gradient is made before the clock starts; "
    "DeferredAdam's time includes the catch-up of the batch's rows. Ratios are of the medians.\n"
    "On a busy machine these times mean nothing, least of all those of several threads."
)


@dataclass(frozen=True)
class Size:
    rows: int
    dim: int
    ids: int  # per step

    def __str__(self) -> str:
        return f"{self.rows:,} x {self.dim}, {self.ids:,} ids"


SIZES = (Size(10_000, 16, 1_024), Size(100_000, 32, 8_192), Size(1_000_000, 64, 65_536))


@dataclass(frozen=True)
class Line:
    name: str
    size: Size
    threads: int
    ours: list[float] = field(default_factory=list)  # seconds of each step
    theirs: list[float] = field(default_factory=list)


def run(arguments: argparse.Namespace) -> int:
    console = extras.console()
    threads = arguments.threads or sorted({1, torch.get_num_threads()})
    sizes = SIZES[:1] if arguments.quick else SIZES
    console.print(_table(list(_lines(threads, arguments.seconds, sizes, console))))
    return 0


class Pair:
    """One of rowstep's optimizers and the one of torch that computes the same, on the same weights and gradients."""

    ours: SparseAdam | DeferredAdam
    theirs: torch.optim.Optimizer

    def __init__(self, name: str, size: Size) -> None:
        self.name, self.size, self._random = name, size, torch.Generator().manual_seed(0)
        start = torch.randn(size.rows, size.dim, generator=self._random).mul_(0.1)
        self._table, self._other_table = nn.Parameter(start), nn.Parameter(start.clone())
        # Sums of such numbers are exact in any order, so duplicate ids cannot make the two differ.
        self._slopes = torch.randint(-64, 65, (size.ids, size.dim), generator=self._random) / 64
        if name == SPARSE:
            self.ours, self.theirs = SparseAdam([self._table]), torch.optim.SparseAdam([self._other_table])
        else:
            self.ours, self.theirs = DeferredAdam([self._table]), torch.optim.Adam([self._other_table], fused=True)

    def prepare(self) -> None:
        """Give both the gradient of the next batch."""
        self._other_table.grad = None  # a dense one is as large as the table: not two at once
        self._ids = self._next_ids()
        self._table.grad = gradient = torch.sparse_coo_tensor(
            self._ids.unsqueeze(0), self._slopes, self._table.shape, check_invariants=False
        )
        self._other_table.grad = gradient if self.name == SPARSE else gradient.to_dense()

    def step(self) -> None:
        """As training has it: DeferredAdam brings rows up to date before they are read."""
        if isinstance(self.ours, DeferredAdam):
            self.ours.catch_up(self._table, self._ids)
        self.ours.step()

    def check(self) -> None:
        """Refuse to time the two unless a few steps lead both to the same weights."""
        for _ in range(CHECKED_STEPS):
            self.prepare()
            self.step()
            self.theirs.step()
        if isinstance(self.ours, DeferredAdam):
            self.ours.flush()
        worst = (self._table.detach() - self._other_table.detach()).abs_().max().item()
        if not worst <= LARGEST_DIFFERENCE:  # nor if it is NaN
            about = f"{self.name}, {self.size}: weights differ from torch's by up to {worst:.2e}"
            raise extras.CommandError(f"{about}; their times cannot be compared")

    def warm_up(self) -> None:
        """Write to all moments, because zeroed pages take time when first written; and let rows wait."""
        for state in (self.ours.state[self._table], self.theirs.state[self._other_table]):
            state["exp_avg"].add_(0)
            state["exp_avg_sq"].add_(0)
        for _ in range(WAITED_STEPS if self.name == DEFERRED else 0):
            self.prepare()
            self.step()

    def _next_ids(self) -> Tensor:
        """Ids that follow Zipf's law, the most frequent first: their logarithms are uniform."""
        draws = torch.rand(self.size.ids, generator=self._random, dtype=torch.float64)
        return (self.size.rows**draws).long() - 1


def _lines(threads: Sequence[int], seconds: float, sizes: Sequence[Size], console: Console) -> Iterator[Line]:
    before = torch.get_num_threads()
    try:
        for name, size, count in itertools.product((SPARSE, DEFERRED), sizes, threads):
            line = Line(name, size, count)
            with console.status(f"measuring {name}, {size}, threads: {count}"):
                torch.set_num_threads(count)
                _measure(line, seconds)
            yield line
    finally:
        torch.set_num_threads(before)


def _measure(line: Line, seconds: float) -> None:
    pair = Pair(line.name, line.size)
    pair.check()
    pair.warm_up()
    turns: list[tuple[Callable[[], object], list[float]]] = [(pair.step, line.ours), (pair.theirs.step, line.theirs)]
    stop = time.perf_counter() + seconds
    while len(line.ours) < ROUNDS or time.perf_counter() < stop:
        pair.prepare()
        for step, taken in turns:
            start = time.perf_counter()
            step()
            taken.append(time.perf_counter() - start)
        turns.reverse()  # the second finds the gradient in the cache


def _table(lines: Iterable[Line]) -> Table:
    from rich.table import Table

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

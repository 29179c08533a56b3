"""`rowstep bench`: a step of rowstep's optimizers beside torch's, on the user's machine, in about a minute.

The two of a pair take turns, so that a machine that slows down for a second slows both. The rest of the measurements,
with plots and what each should reach, is in `benchmarks/` in the repository.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import torch
from torch import nn

from rowstep import DeferredAdam, SparseAdam
from rowstep.cli import extras

SPARSE, DEFERRED = "SparseAdam", "DeferredAdam"
ROUNDS = 5  # at least, where a step takes long
CHECKED_STEPS = 3
LARGEST_DIFFERENCE = 1e-6  # a thousandth of a step; weights below 1 are rounded to 6e-8
WAITED_STEPS = 100  # as in a long training: the rows of a new table would have nothing to catch up
CAPTION = (
    "torch: SparseAdam, and Adam (fused) beside DeferredAdam. Adam's dense gradient is made before the clock starts; "
    "DeferredAdam's time includes the catch-up of the batch's rows. On a busy machine these times mean nothing."
)


class Size(NamedTuple):
    rows: int
    dim: int
    ids: int  # per step

    def __str__(self) -> str:
        return f"{self.rows:,} x {self.dim}, {self.ids:,} ids"


SIZES = (Size(10_000, 16, 1_024), Size(100_000, 32, 8_192), Size(1_000_000, 64, 65_536))


def run(arguments: argparse.Namespace) -> int:
    console = extras.console()
    from rich.table import Table

    title = f"One step: median (min) in ms; torch {torch.__version__}, {os.cpu_count()} cores"
    table = Table("optimizer", "table, Zipf ids per step", title=title, caption=CAPTION)
    for heading in ("threads", "rounds", "rowstep", "torch", "torch / rowstep"):
        table.add_column(heading, justify="right")
    before = torch.get_num_threads()
    sizes, threads = SIZES[: 1 if arguments.quick else None], arguments.threads or sorted({1, before})
    try:
        for name, size, count in itertools.product((SPARSE, DEFERRED), sizes, threads):
            torch.set_num_threads(count)
            with console.status(f"measuring {name}, {size}, threads: {count}"):
                taken = _measure(Pair(name, size), arguments.seconds)
            times = [f"{1e3 * median(seconds):,.3f} ({1e3 * min(seconds):,.3f})" for seconds in taken]
            ratio = median(taken[1]) / median(taken[0])
            table.add_row(name, str(size), str(count), str(len(taken[0])), *times, f"{ratio:.1f}x")
    finally:
        torch.set_num_threads(before)
    console.print(table)
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
        # Ids that follow Zipf's law, the most frequent first: their logarithms are uniform.
        draws = torch.rand(self.size.ids, generator=self._random, dtype=torch.float64)
        self._ids = (self.size.rows**draws).long() - 1
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


def _measure(pair: Pair, seconds: float) -> tuple[list[float], list[float]]:
    """The seconds of each of our steps, and of torch's."""
    pair.check()
    pair.warm_up()
    taken: tuple[list[float], list[float]] = [], []
    turns: list[tuple[Callable[[], object], list[float]]] = [(pair.step, taken[0]), (pair.theirs.step, taken[1])]
    stop = time.perf_counter() + seconds
    while len(taken[0]) < ROUNDS or time.perf_counter() < stop:
        pair.prepare()
        for step, times in turns:
            start = time.perf_counter()
            step()
            times.append(time.perf_counter() - start)
        turns.reverse()  # the second finds the gradient in the cache
    return taken

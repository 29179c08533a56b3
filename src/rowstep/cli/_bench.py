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

import torch
from torch import nn

from rowstep import DeferredAdam, SparseAdam
from rowstep.cli import extras

SIZES = ((10_000, 16, 1_024), (100_000, 32, 8_192), (1_000_000, 64, 65_536))  # rows, columns, ids per step
ROUNDS = 5  # at least, where a step takes long
CHECKED_STEPS = 3
LARGEST_DIFFERENCE = 1e-6  # a thousandth of a step; weights below 1 are rounded to 6e-8
WAITED_STEPS = 100  # as in a long training: the rows of a new table would have nothing to catch up
CAPTION = (
    "torch: SparseAdam, and Adam (fused) beside DeferredAdam. Adam's dense gradient is made before the clock starts; "
    "DeferredAdam's time includes the catch-up of the batch's rows. On a busy machine these times mean nothing."
)


def run(arguments: argparse.Namespace) -> int:
    console = extras.console()
    title = f"One step: median (min) in ms; torch {torch.__version__}, {os.cpu_count()} cores"
    numbers = ("threads", "rounds", "rowstep", "torch", "torch / rowstep")
    table = extras.table(title, ("optimizer", "table, Zipf ids per step"), numbers, CAPTION)
    before = torch.get_num_threads()
    sizes, threads = SIZES[: 1 if arguments.quick else None], arguments.threads or sorted({1, before})
    try:
        for kind, (rows, dim, ids), count in itertools.product((SparseAdam, DeferredAdam), sizes, threads):
            torch.set_num_threads(count)
            name, size = kind.__name__, f"{rows:,} x {dim}, {ids:,} ids"
            with console.status(f"measuring {name}, {size}, threads: {count}"):
                pair = Pair(kind, rows, dim, ids)
                if not (worst := pair.difference()) <= LARGEST_DIFFERENCE:  # nor if it is NaN
                    about = f"{name}, {size}: weights differ from torch's by up to {worst:.2e}"
                    raise extras.CommandError(f"{about}; their times cannot be compared")
                ours, theirs = pair.measure(arguments.seconds)
            times = [f"{1e3 * median(taken):,.3f} ({1e3 * min(taken):,.3f})" for taken in (ours, theirs)]
            table.add_row(name, size, str(count), str(len(ours)), *times, f"{median(theirs) / median(ours):.1f}x")
    finally:
        torch.set_num_threads(before)
    console.print(table)
    return 0


class Pair:
    """One of rowstep's optimizers and the one of torch that computes the same, on the same weights and gradients."""

    def __init__(self, kind: type[SparseAdam | DeferredAdam], rows: int, dim: int, ids: int) -> None:
        self._random = torch.Generator().manual_seed(0)
        start = torch.randn(rows, dim, generator=self._random).mul_(0.1)
        self._table, self._other_table = nn.Parameter(start), nn.Parameter(start.clone())
        # Sums of such numbers are exact in any order, so duplicate ids cannot make the two differ.
        self._slopes = torch.randint(-64, 65, (ids, dim), generator=self._random) / 64
        self._ours = kind([self._table])
        self._theirs: torch.optim.Optimizer = torch.optim.SparseAdam([self._other_table])
        if kind is DeferredAdam:
            self._theirs = torch.optim.Adam([self._other_table], fused=True)

    def _prepare(self) -> None:
        """Give both the gradient of the next batch."""
        self._other_table.grad = None  # a dense one is as large as the table: not two at once
        # Ids that follow Zipf's law, the most frequent first: their logarithms are uniform.
        draws = torch.rand(len(self._slopes), generator=self._random, dtype=torch.float64)
        self._ids = (len(self._table) ** draws).long() - 1
        self._table.grad = gradient = torch.sparse_coo_tensor(
            self._ids.unsqueeze(0), self._slopes, self._table.shape, check_invariants=False
        )
        self._other_table.grad = gradient.to_dense() if isinstance(self._ours, DeferredAdam) else gradient

    def _step(self) -> None:
        """As training has it: DeferredAdam brings rows up to date before they are read."""
        if isinstance(self._ours, DeferredAdam):
            self._ours.catch_up(self._table, self._ids)
        self._ours.step()

    def difference(self) -> float:
        """The largest between the weights of the two after a few steps."""
        for _ in range(CHECKED_STEPS):
            self._prepare()
            self._step()
            self._theirs.step()
        if isinstance(self._ours, DeferredAdam):
            self._ours.flush()
        return (self._table.detach() - self._other_table.detach()).abs_().max().item()

    def measure(self, seconds: float) -> tuple[list[float], list[float]]:
        """The seconds of each of our steps, and of torch's."""
        for state in (self._ours.state[self._table], self._theirs.state[self._other_table]):
            for name in ("exp_avg", "exp_avg_sq"):
                state[name].add_(0)  # zeroed pages take time when first written
        for _ in range(WAITED_STEPS if isinstance(self._ours, DeferredAdam) else 0):
            self._prepare()
            self._step()
        ours: list[float] = []
        theirs: list[float] = []
        turns: list[tuple[Callable[[], object], list[float]]] = [(self._step, ours), (self._theirs.step, theirs)]
        stop = time.perf_counter() + seconds
        while len(ours) < ROUNDS or time.perf_counter() < stop:
            self._prepare()
            for step, times in turns:
                start = time.perf_counter()
                step()
                times.append(time.perf_counter() - start)
            turns.reverse()  # the second finds the gradient in the cache
        return ours, theirs

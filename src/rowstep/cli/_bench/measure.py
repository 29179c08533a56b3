"""The two of a pair take turns, so that a machine that slows down for a second slows both."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from rowstep.cli._bench.pairs import DEFERRED, SPARSE, Pair, Size

if TYPE_CHECKING:
    from rich.console import Console

SIZES = (Size(10_000, 16, 1_024), Size(100_000, 32, 8_192), Size(1_000_000, 64, 65_536))
ROUNDS = 5  # at least, where a step takes long


@dataclass(frozen=True)
class Line:
    name: str
    size: Size
    threads: int
    ours: list[float] = field(default_factory=list)  # seconds of each step
    theirs: list[float] = field(default_factory=list)


def lines(threads: Sequence[int], seconds: float, sizes: Sequence[Size], console: Console) -> Iterator[Line]:
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
    turns = [(pair.step, line.ours), (pair.other_step, line.theirs)]
    stop = time.perf_counter() + seconds
    while len(line.ours) < ROUNDS or time.perf_counter() < stop:
        pair.prepare()
        for step, taken in turns:
            start = time.perf_counter()
            step()
            taken.append(time.perf_counter() - start)
        turns.reverse()  # the second finds the gradient in the cache

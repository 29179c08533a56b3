"""Contenders take turns: A B C D, A B C D, ... so that a machine that slows down for a second slows all of them."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.load import BUSY, watch

# Short steps are repeated more often than asked for: up to MORE times as often, until this much time has passed.
SECONDS_PER_REPEAT = 0.04
MORE = 10


@dataclass(frozen=True)
class Contender:
    name: str
    prepare: Callable[[int], None]  # untimed; is given the number of the round
    run: Callable[[], object]  # timed
    at_most: int | None = None  # rounds, for those too slow to take part in all


@dataclass(frozen=True)
class Timing:
    seconds: tuple[float, ...]

    @property
    def min(self) -> float:
        return min(self.seconds)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


@dataclass(frozen=True)
class Measurement:
    """One round-robin: what was timed, on how many threads, and who was left out and why."""

    kind: str  # step, scaling, loop, dense, flush or share
    name: str
    about: str
    threads: int
    timings: dict[str, Timing]
    left_out: dict[str, str]
    others: float  # share of the machine that other work took meanwhile

    @property
    def disturbed(self) -> bool:
        return self.others > BUSY

    def ratio(self, slow: str, fast: str) -> float | None:
        """How many times longer `slow` takes, by the medians; None if one of them did not take part."""
        if slow not in self.timings or fast not in self.timings:
            return None
        return self.timings[slow].median / self.timings[fast].median

    def as_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "name": self.name,
            "about": self.about,
            "threads": self.threads,
            "seconds": {
                name: {"min": timing.min, "median": timing.median, "all": timing.seconds}
                for name, timing in self.timings.items()
            },
            "left_out": self.left_out,
            "share_of_machine_taken_by_others": self.others,
        }


def measure(
    kind: str,
    name: str,
    about: str,
    contenders: Sequence[Contender],
    repeats: int,
    left_out: dict[str, str] | None = None,
) -> Measurement:
    for contender in contenders:
        warm_up(contender, 1)
    with watch() as load:
        timings = _take_turns(contenders, repeats)
    return Measurement(kind, name, about, torch.get_num_threads(), timings, left_out or {}, load.others)


def _take_turns(contenders: Sequence[Contender], repeats: int) -> dict[str, Timing]:
    seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    start = time.perf_counter()
    with no_garbage_collection():  # and no pause before a turn: sleeping doubled the times of steps below a millisecond
        for number in range(repeats * MORE):
            if number >= repeats and time.perf_counter() - start > SECONDS_PER_REPEAT * repeats:
                break
            for contender in contenders:
                if contender.at_most is None or number < contender.at_most:
                    seconds[contender.name].append(_time(contender, number))
    return {name: Timing(tuple(samples)) for name, samples in seconds.items()}


def _time(contender: Contender, number: int) -> float:
    contender.prepare(number)
    start = time.perf_counter()
    contender.run()
    return time.perf_counter() - start


def warm_up(contender: Contender, rounds: int) -> None:
    for number in range(rounds):
        contender.prepare(number)
        contender.run()


def nothing(_number: int) -> None:
    """The `prepare` of a contender whose gradient stays the same."""


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()

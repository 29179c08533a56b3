"""Contenders take turns: A B C D, A B C D, ... so that a machine that slows down for a second slows all of them."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

# Short steps are repeated more often than asked for: up to MORE times as often, until this much time has passed.
SECONDS_PER_REPEAT = 0.04
MORE = 10

BUSY = 0.1  # share of the machine; a second core that is busy for a tenth of the time already shows in two-thread times


@dataclass(frozen=True)
class Contender:
    name: str
    prepare: Callable[[int], None]  # untimed; is given the number of the round
    run: Callable[[], object]  # timed
    at_most: int | None = None  # rounds, for those too slow to take part in all

    def warm_up(self, rounds: int = 1) -> None:
        for number in range(rounds):
            self.time(number)

    def time(self, number: int) -> float:
        self.prepare(number)
        start = time.perf_counter()
        self.run()
        return time.perf_counter() - start


@dataclass(frozen=True)
class Timing:
    """In seconds."""

    min: float
    median: float
    rounds: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        return cls(min(seconds), statistics.median(seconds), len(seconds))


@dataclass(frozen=True)
class Measurement:
    """One round-robin: what was timed, on how many threads, and who was left out and why."""

    kind: str  # such as step, loop or flush: what a table has lines of
    name: str
    about: str
    threads: int
    timings: Mapping[str, Timing]
    left_out: Mapping[str, str] = field(default_factory=dict)
    others: float = 0.0  # share of the machine that other work took meanwhile

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
                name: {"min": _short(timing.min), "median": _short(timing.median), "rounds": timing.rounds}
                for name, timing in self.timings.items()
            },
            "left_out": self.left_out,
            "share_of_machine_taken_by_others": _short(self.others),
        }

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Measurement:
        timings = {name: Timing(**seconds) for name, seconds in given["seconds"].items()}
        about = {key: given[key] for key in ("kind", "name", "about", "threads", "left_out")}
        return cls(**about, timings=timings, others=given["share_of_machine_taken_by_others"])


def measure(kind: str, name: str, about: str, contenders: Sequence[Contender], repeats: int) -> Measurement:
    for contender in contenders:
        contender.warm_up()
    with watch() as load:
        timings = _take_turns(contenders, repeats)
    return Measurement(kind, name, about, torch.get_num_threads(), timings, {}, load.others)


def _take_turns(contenders: Sequence[Contender], repeats: int) -> dict[str, Timing]:
    seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    start = time.perf_counter()
    with no_garbage_collection():  # and no pause before a turn: sleeping doubled the times of steps below a millisecond
        for number in range(repeats * MORE):
            if number >= repeats and time.perf_counter() - start > SECONDS_PER_REPEAT * repeats:
                break
            for contender in contenders:
                if contender.at_most is None or number < contender.at_most:
                    seconds[contender.name].append(contender.time(number))
    return {name: Timing.of(samples) for name, samples in seconds.items()}


def _short(figure: float) -> float:
    """The digits that count: results are kept in the repository."""
    return float(f"{figure:.4g}")


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


class Load:
    """How much of the machine other work took: a busy neighbour makes times worthless. 0 until the watch ends."""

    others: float = 0.0


@contextmanager
def watch(helpers: Iterable[int] = ()) -> Iterator[Load]:
    """``helpers`` are processes whose work belongs to the measurement."""
    load, helpers = Load(), tuple(helpers)
    start, busy, own = time.perf_counter(), _busy_seconds(), _own_seconds(helpers)
    yield load
    if busy is not None and (now := _busy_seconds()) is not None:  # None: the system does not tell
        others = (now - busy) - (_own_seconds(helpers) - own)
        load.others = max(0.0, others / (time.perf_counter() - start) / (os.cpu_count() or 1))


def _own_seconds(helpers: Iterable[int]) -> float:
    """Of this process, of the children it has waited for, and of the helpers."""
    return sum(os.times()[:4]) + sum(map(_seconds_of, helpers))


def _seconds_of(process: int) -> float:
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return 0.0
    user, system = stat.rpartition(")")[2].split()[11:13]  # the name before that, in brackets, may hold anything
    return float(int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _busy_seconds() -> float | None:
    """Seconds that all cores together have worked since boot, time stolen by other virtual machines included."""
    try:
        stat = Path("/proc/stat").read_text()
        user, nice, system, _idle, _wait, *rest = map(int, stat.split("\n", 1)[0].split()[1:9])
    except (OSError, ValueError):
        return None
    return float(user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")

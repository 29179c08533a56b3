"""How much of the machine other work took during a measurement: a busy neighbour makes its times worthless."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

_STAT = Path("/proc/stat")


BUSY = 0.1  # share of the machine; a second core that is busy for a tenth of the time already shows in two-thread times


class Load:
    """Filled when the measurement ends; 0 where the system does not tell."""

    others: float = 0.0


@contextmanager
def watch(helpers: Iterable[int] = ()) -> Iterator[Load]:
    """``helpers`` are processes whose work belongs to the measurement."""
    load, helpers = Load(), tuple(helpers)
    start, busy, own = time.perf_counter(), _busy_seconds(), _own_seconds(helpers)
    yield load
    if busy is not None and (now := _busy_seconds()) is not None:
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
        user, nice, system, _idle, _wait, *rest = map(int, _STAT.read_text().split("\n", 1)[0].split()[1:9])
    except (OSError, ValueError):
        return None
    return float(user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")

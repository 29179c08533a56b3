"""How much of the machine other work took during a measurement: a busy neighbour makes its times worthless."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_STAT = Path("/proc/stat")


BUSY = 0.1  # share of the machine; a second core that is busy for a tenth of the time already shows in two-thread times


class Load:
    """Filled when the measurement ends; 0 where the system does not tell."""

    others: float = 0.0


@contextmanager
def watch() -> Iterator[Load]:
    load = Load()
    start, busy, own = time.perf_counter(), _busy_seconds(), _own_seconds()
    yield load
    if busy is not None and (now := _busy_seconds()) is not None:
        others = (now - busy) - (_own_seconds() - own)
        load.others = max(0.0, others / (time.perf_counter() - start) / (os.cpu_count() or 1))


def _own_seconds() -> float:
    """Of this process and of the children it has waited for."""
    return sum(os.times()[:4])


def _busy_seconds() -> float | None:
    """Seconds that all cores together have worked since boot, time stolen by other virtual machines included."""
    try:
        user, nice, system, _idle, _wait, *rest = map(int, _STAT.read_text().split("\n", 1)[0].split()[1:9])
    except (OSError, ValueError):
        return None
    return float(user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")

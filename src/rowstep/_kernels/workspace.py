"""Memory that is kept between launches."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from . import share
from .job import JOB_WORDS
from .pool import OverThreads

# The most that a thread keeps: 64 MB of keys, for four million ids, and rows to sum in for some hundred widths. Two
# million ids a step took 279 ms with memory that is kept and 328 ms with fresh memory.
_KEPT_KEYS = 1 << 22
_KEPT_TOTALS_BYTES = 1 << 20


class Keys:
    """Room to sort keys in: twice as many as there are."""

    __slots__ = ("_memory", "at", "size", "spare_at")

    def __init__(self, size: int) -> None:
        self._memory = np.empty((2, size), np.uint64)
        self.size, self.at = size, self._memory.ctypes.data
        self.spare_at = self.at + size * self._memory.itemsize


class Workspace(threading.local):
    """Memory kept between steps: fresh memory costs a page fault for every 512 ids.

    What it hands out holds nothing that depends on the table until a kernel fills it. So a signal handler that steps,
    while the same thread prepares or compiles another step, does no harm.
    """

    def __init__(self) -> None:
        self._keys = Keys(0)
        self._totals: dict[tuple[int, int, str], Any] = {}
        self._totals_bytes = 0

    def totals(self, parts: int, columns: int, dtype: str) -> Any:
        """For each part of the work a row to sum in."""
        key = parts, columns, dtype
        totals = self._totals.get(key)
        if totals is None:
            totals = np.empty((parts, columns), dtype)
            self._keep(key, totals)
        return totals

    def _keep(self, key: tuple[int, int, str], totals: Any) -> None:
        if totals.nbytes > _KEPT_TOTALS_BYTES:
            return
        if self._totals_bytes + totals.nbytes > _KEPT_TOTALS_BYTES:
            self._totals.clear()
            self._totals_bytes = 0
        self._totals[key] = totals
        self._totals_bytes += totals.nbytes

    def keys(self, size: int) -> Keys:
        """Room for at least so many keys."""
        keys = self._keys
        if keys.size < size:
            keys = Keys(size)
            if size <= _KEPT_KEYS:
                self._keys = keys
        return keys


workspace = Workspace()

_ALONE = np.empty(0, np.int64)


Room = tuple[Any, Any, Keys, Any, Any]
"""What a launch needs besides its jobs: results, of which each thread leaves one, pieces of work, keys and totals. And
who wants to know how long it took."""


def reserve(kernel: OverThreads, jobs: Any, byte_count: int, most_threads: int, most_ids: int, columns: int) -> Room:
    """Room for a launch over these jobs: so many bytes of gradient, and none has more ids or columns than this."""
    threads, pace = kernel.threads_for(byte_count, most_threads)
    pieces, size = _ALONE, most_ids + 1
    if threads > 1:
        pieces = np.empty(share.room_for_pieces(jobs.size // JOB_WORDS, threads), np.int64)
        size = share.share(jobs, threads, pieces)
    return np.zeros(threads), pieces, workspace.keys(size), workspace.totals(threads, columns, kernel.number), pace


def launch(kernel: OverThreads, jobs: Any, room: Room, power: float = 0.0) -> Any:
    """Run a kernel over the jobs, on a thread for each of the results, and return those."""
    results, pieces, keys, totals, pace = room
    arguments = results, jobs, pieces, keys.at, keys.spare_at, totals, power
    if pace is None:
        kernel.part_kernel(0, *arguments)
    else:
        kernel(results.size, *arguments, pace=pace)
    return results

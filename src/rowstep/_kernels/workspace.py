"""Memory for launches, which is kept for the next ones: fresh memory costs a page fault for every 512 ids.

Whoever launches borrows a workspace and gives it back afterwards. So a signal's handler that steps, or another thread,
has one of its own, and what a kernel is told stays as it is until it has run.
"""

from __future__ import annotations

import struct
from typing import Any, TypeVar

import numpy as np

from .ids import first_flawed, group
from .job import LAUNCH_WORDS
from .pace import Pace
from .pool import OverThreads
from .share import room_for_pieces, share

# The most that is kept of one workspace: 64 MB of keys, for four million ids, and 1 MB of what a kernel is told and
# sums in. Two million ids a step took 279 ms with memory that is kept and 328 ms with fresh memory.
_KEPT_KEYS = 1 << 23
_KEPT_WORDS = 1 << 17

_LAUNCH = struct.Struct("=9qd")
_LAUNCH_BYTES = LAUNCH_WORDS * 8


class Block:
    """Words of 64 bits, and where they are."""

    __slots__ = ("at", "bytes", "size", "words")

    def __init__(self, size: int) -> None:
        self.words = np.empty(size, np.int64)
        self.size, self.at = size, self.words.ctypes.data
        self.bytes = memoryview(self.words).cast("B")  # type: ignore[arg-type]


class Workspace:
    """Memory for one launch at a time: what its kernel is told, keys to sort, rows to sum in, results and pieces.

    In this order: ``add`` jobs, ``check`` them, ``reserve`` the memory that the kernel needs for them, ``run`` it,
    ``give_back``.
    """

    __slots__ = (
        "_byte_count", "_columns", "_group_at", "_ids", "_job_count", "_keys", "_pace", "_pieces", "_results", "_rows",
        "_threads", "_told", "_words", "kernel",
    )  # fmt: skip

    def __init__(self) -> None:
        self._told, self._keys, self._rows = Block(_LAUNCH_BYTES), Block(0), Block(0)
        self._results, self._pieces = Block(1), Block(0)
        self._group_at = group.address
        self.kernel: Any = None
        """An ``OverThreads``; None where jobs are only checked."""
        self._threads, self._pace = 1, _NO_PACE
        self._words: list[bytes] = []
        self._job_count = self._byte_count = self._ids = self._columns = 0
        """Of all jobs together; and the most that one of them has."""

    def add(self, ids: int, columns: int, byte_count: int, *words: bytes) -> None:
        """Add a job, in words, over so many ids, with a gradient of so many bytes."""
        self._words += words
        self._job_count += 1
        self._byte_count += byte_count
        if ids > self._ids:
            self._ids = ids
        if columns > self._columns:
            self._columns = columns

    def check(self) -> int:
        """The number of the first job that names a row which cannot be stepped, or -1."""
        jobs = b"".join(self._words)
        end = _LAUNCH_BYTES + len(jobs)
        if end > self._told.size * 8:
            self._told = Block(end // 8)
        self._told.bytes[_LAUNCH_BYTES:end] = jobs
        flawed: int = first_flawed.call(self._told.at + _LAUNCH_BYTES, self._job_count)
        return flawed

    def reserve(self, most_threads: int, power: float = 0.0) -> None:
        """Have all the memory that it takes to run the kernel over the jobs."""
        kernel: OverThreads = self.kernel
        jobs_at, pieces_at, key_count, threads = self._told.at + _LAUNCH_BYTES, 0, self._ids + 1, 1
        self._pace = _NO_PACE
        if most_threads > 1:
            threads, self._pace = kernel.threads_for(self._byte_count, most_threads)
        stride = self._columns * kernel.number.bitwidth // 8
        if threads > 1:
            self._pieces = Block(room_for_pieces(self._job_count, threads))
            pieces_at = self._pieces.at
            key_count = share.call(jobs_at, self._job_count, threads, pieces_at)
            stride = (stride + 63) & -64
            if self._results.size < threads:
                self._results = Block(threads)
        if self._keys.size < 2 * key_count:
            self._keys = Block(2 * key_count)
        if self._rows.size * 8 < threads * stride:
            self._rows = Block((threads * stride + 7) // 8)
        self._threads, keys = threads, self._keys
        _LAUNCH.pack_into(
            self._told.bytes, 0, jobs_at, self._job_count, pieces_at, keys.at, keys.at + keys.size // 2 * 8,
            self._rows.at, stride, self._results.at, self._group_at, power,
        )  # fmt: skip

    def run(self) -> int:
        """Run the kernel over the jobs; return how many rows it has skipped."""
        if self._pace is None:
            skipped: int = self.kernel.kernel.call(0, self._told.at)
            return skipped
        self.kernel.run(self._threads, self._told.at, self._pace)
        return int(self.results.sum())

    @property
    def results(self) -> Any:
        """What each part of the last run came to."""
        return self._results.words[: self._threads].view(np.float64)

    def tell(self, words: bytes, room: int = 0) -> int:
        """Write words for a kernel that takes no jobs, and leave so many bytes behind them; return where they are."""
        size = len(words)
        if size + room > self._told.size * 8:
            self._told = Block((size + room + 7) // 8)
        self._told.bytes[:size] = words
        return self._told.at

    def give_back(self) -> None:
        """Let others use this memory from now on."""
        self._words.clear()
        self._job_count = self._byte_count = self._ids = self._columns = 0
        if self._keys.size > _KEPT_KEYS:
            self._keys = Block(0)
        if self._rows.size + self._told.size > _KEPT_WORDS:
            self._told, self._rows = Block(_LAUNCH_BYTES), Block(0)
        _free.setdefault(type(self), []).append(self)


_NO_PACE: Pace | None = None
_W = TypeVar("_W", bound=Workspace)
_free: dict[type, list[Any]] = {}


def borrow(kind: type[_W], kernel: OverThreads | None = None) -> _W:
    """A workspace of this kind that nobody else has, for this kernel."""
    try:
        workspace: _W = _free[kind].pop()
    except (IndexError, KeyError):
        workspace = kind()
    workspace.kernel = kernel
    return workspace

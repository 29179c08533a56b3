"""What every launch of a kernel shares: when to use threads, and memory that is kept between launches."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

# Below this many bytes of gradient, waking threads costs more than they save.
PARALLEL_FROM_BYTES = 128 << 10


class Workspace(threading.local):
    """Memory kept between steps: fresh memory costs a page fault for every 512 ids."""

    def __init__(self) -> None:
        self._keys = self._spare = np.empty(0, np.uint64)
        self._bounds = np.zeros((3, 2), np.int64)
        self._totals: dict[tuple[int, int, Any], Any] = {}

    def bounds(self, parts: int) -> Any:
        """Where each part of the work begins, a row number and a place among the keys, and what it has skipped."""
        if self._bounds.shape[1] != parts + 1:
            self._bounds = np.zeros((3, parts + 1), np.int64)
        return self._bounds

    def totals(self, parts: int, columns: int, dtype: Any) -> Any:
        """For each part of the work a row to sum in."""
        key = parts, columns, dtype
        if key not in self._totals:
            self._totals[key] = np.empty((parts, columns), dtype)
        return self._totals[key]

    def grouping(self, rows_at: int, count: int, row_count: int, parts: int) -> tuple[int, int, int, int, Any, Any]:
        """What kernels group by: row numbers, how many bits of a key are its position and its row, room for keys."""
        if self._keys.size < count + parts:
            self._keys, self._spare = (np.empty(count + parts, np.uint64) for _ in range(2))
        return rows_at, count, (count - 1).bit_length(), (row_count - 1).bit_length(), self._keys, self._spare


workspace = Workspace()

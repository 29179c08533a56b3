"""What every launch of a kernel shares: when to use threads, and memory that is kept between launches."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

# Below this many bytes of gradient, waking threads costs more than they save.
PARALLEL_FROM_BYTES = 128 << 10

# What a thread always keeps: keys of a million ids, and rows to sum in for some hundred widths.
_KEPT_KEYS = 1 << 20
_KEPT_TOTALS_BYTES = 1 << 20

# More keys are kept from the second time that they are needed, and given back after so many launches that needed a
# quarter or less: two million ids a step took 279 ms with memory that is kept and 328 ms with fresh memory.
_PATIENCE = 1000

_EVERY_ROW = np.iinfo(np.int64).max


class Workspace(threading.local):
    """Memory kept between steps: fresh memory costs a page fault for every 512 ids.

    What it hands out holds nothing that depends on the table until a kernel fills it. So a signal handler that steps,
    while the same thread prepares or compiles another step, does no harm.
    """

    def __init__(self) -> None:
        self._keys = self._spare = np.empty(0, np.uint64)
        self._bounds = np.zeros((3, 2), np.int64)
        self._not_kept = self._too_large_for = 0
        self._totals: dict[tuple[int, int, Any], Any] = {}
        self._totals_bytes = 0

    def bounds(self, parts: int) -> Any:
        """Where each part of the work begins, a row number and a place among the keys, and what it has skipped."""
        if self._bounds.shape[1] != parts + 1:
            self._bounds = np.zeros((3, parts + 1), np.int64)
        # A single part has every row; what several parts have, `split` writes.
        self._bounds[0, -1] = _EVERY_ROW
        return self._bounds

    def totals(self, parts: int, columns: int, dtype: Any) -> Any:
        """For each part of the work a row to sum in."""
        key = parts, columns, dtype
        totals = self._totals.get(key)
        if totals is None:
            totals = np.empty((parts, columns), dtype)
            self._keep(key, totals)
        return totals

    def _keep(self, key: tuple[int, int, Any], totals: Any) -> None:
        if totals.nbytes > _KEPT_TOTALS_BYTES:
            return
        if self._totals_bytes + totals.nbytes > _KEPT_TOTALS_BYTES:
            self._totals.clear()
            self._totals_bytes = 0
        self._totals[key] = totals
        self._totals_bytes += totals.nbytes

    def grouping(self, rows_at: int, count: int, row_count: int, parts: int) -> tuple[int, int, int, int, Any, Any]:
        """What kernels group by: row numbers, how many bits of a key are its position and its row, room for keys."""
        keys, spare = self._keys, self._spare
        if keys.size < count + parts:
            keys, spare = self._new_keys(count + parts)
        elif keys.size > _KEPT_KEYS:
            self._give_back_what_is_unused(count + parts)
        return rows_at, count, (count - 1).bit_length(), (row_count - 1).bit_length(), keys, spare

    def _new_keys(self, size: int) -> tuple[Any, Any]:
        keys, spare = np.empty(size, np.uint64), np.empty(size, np.uint64)
        if size <= max(_KEPT_KEYS, 2 * self._not_kept):
            self._keys, self._spare, self._too_large_for = keys, spare, 0
        else:
            self._not_kept = size
        return keys, spare

    def _give_back_what_is_unused(self, size: int) -> None:
        self._too_large_for = self._too_large_for + 1 if 4 * size <= self._keys.size else 0
        if self._too_large_for >= _PATIENCE:
            self._keys = self._spare = np.empty(0, np.uint64)
            self._not_kept = 0


workspace = Workspace()

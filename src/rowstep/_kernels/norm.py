"""The norm of a row gradient, duplicates combined: the update's grouping, with nothing written but the sums."""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from .adam import group_part, summed_gradient
from .bits import CACHE_LINE, INLINE, borrowed, ids_at
from .cache import kernel
from .group import next_row_start, split
from .parallel import call_for_parts


@kernel
def norm_part(
    part, power, sums, totals, bounds, rows_at, count, shift, row_bits, keys, spare, g_at, g_stride, g_like, columns
):
    """Leave in ``sums[part]`` the sum of |g|^power over the rows of this part, or the largest |g| for power = inf."""
    keys, last, total = group_part(part, totals, bounds, rows_at, count, shift, row_bits, keys, spare, columns)
    g_like = borrowed(g_like)
    g_bytes = columns * g_like.itemsize
    ahead = (last, g_at, g_bytes, 64 // (g_bytes // CACHE_LINE + 1) + 1, 0, 0, 0, 0, 0, 1)
    result = 0.0
    here = np.int64(0)
    while here < last:
        end = next_row_start(keys, last, here + 1, np.uint64(shift))
        g = summed_gradient(keys, here, end, np.uint64(shift), g_at, g_stride, g_like, total, ahead)
        if power == 2.0:
            result += sum_of_squares(g)
        elif power == math.inf:
            for c in range(g.size):
                # Written so that a NaN, once seen, stays.
                result = result if result >= abs(g[c]) or result != result else np.float64(abs(g[c]))
        else:
            for c in range(g.size):
                result += np.float64(abs(g[c])) ** power if g[c] != 0 else 0.0
        here = end
    sums[part] = result


@kernel
def norm_parallel(pool, threads, power, sums, totals, bounds, rows_at, count, shift, row_bits, *arguments):
    """``norm_part`` for every part that there is a row of ``totals`` for."""
    parts = totals.shape[0]
    split(ids_at(rows_at, count), row_bits, parts, bounds)
    rest = (power, sums, totals, bounds, rows_at, count, shift, row_bits, *arguments)
    call_for_parts(pool, threads, parts, norm_part, rest)


@njit(**INLINE)
def sum_of_squares(g):
    # Four sums in turn: one alone would wait for its own last addition at every number.
    a = b = c = d = 0.0
    whole = g.size // 4 * 4
    for i in range(0, whole, 4):
        a += np.float64(g[i]) * np.float64(g[i])
        b += np.float64(g[i + 1]) * np.float64(g[i + 1])
        c += np.float64(g[i + 2]) * np.float64(g[i + 2])
        d += np.float64(g[i + 3]) * np.float64(g[i + 3])
    for i in range(whole, g.size):
        a += np.float64(g[i]) * np.float64(g[i])
    return (a + b) + (c + d)

"""A visit of the walk: the norm of a gradient, duplicates combined. Nothing is written but the sums."""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from . import INLINE
from .cache import kernel
from .memory import address_of, borrowed
from .pool import OverThreads
from .vectors import LANES, sum_of_squares_at
from .walk import JOB_WORDS, ask_for_nothing, over_gradient, piece_of


@kernel
def norm_part(part, totals, sums, power, jobs, pieces, keys_at, spare_at, g_like):
    """Leave in ``sums[part]`` the sum of |g|^power over the rows of this part, or the largest |g| for power = inf."""
    total_at = address_of(totals) + part * totals.shape[1] * totals.itemsize
    like, g_like, jobs, pieces = borrowed(totals), borrowed(g_like), borrowed(jobs), borrowed(pieces)
    first, last = (0, jobs.size // JOB_WORDS) if pieces.size == 0 else (pieces[1 + part], pieces[2 + part])
    result = 0.0
    for number in range(first, last):
        job, low, high, keys_from = piece_of(number, jobs, pieces)
        result = over_gradient(
            job, low, high, keys_from, keys_at, spare_at, total_at, like, g_like,
            1, ask_for_nothing, add_row, power, result,
        )  # fmt: skip
    sums[part] = result


norm = OverThreads(norm_part)


@njit(**INLINE)
def add_row(row, g, power, result):
    if power == 2.0:
        return result + sum_of_squares(g)
    if power == math.inf:
        for c in range(g.size):
            # Written so that a NaN, once seen, stays.
            result = result if result >= abs(g[c]) or result != result else np.float64(abs(g[c]))
        return result
    for c in range(g.size):
        result += np.float64(abs(g[c])) ** power if g[c] != 0 else 0.0
    return result


@njit(**INLINE)
def sum_of_squares(g):
    """In float64, and in the same order on every processor."""
    whole = g.size // LANES * LANES
    total = sum_of_squares_at(address_of(g), whole, g)
    for i in range(whole, g.size):
        total += np.float64(g[i]) * np.float64(g[i])
    return total

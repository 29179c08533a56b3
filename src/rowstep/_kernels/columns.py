"""A visit of the walk: what a factored second moment needs to know of a gradient before any row can be stepped.

Nothing is written but sums. They are taken in a fixed number of parts, so that they have the same bits for any number
of threads.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from . import INLINE
from .cache import kernel
from .floats import narrow, widen
from .memory import address_of, borrowed, float64s_at, only_if, prefetch, row_at
from .norm import sum_of_squares
from .pool import OverThreads
from .update import BETA2, DECAY, P_AT, SCALARS, V_AT, averaged, decayed_gradient, is_left_out
from .walk import COLUMNS, JOB_WORDS, over_gradient, piece_of

# Behind the sums of the columns: how many rows there are, and the sums of their second moments before and after.
ROWS, BEFORE, AFTER = range(3)
SUMS = 3

_ROWS_AHEAD = 8


@kernel
def column_sums_part(
    part,
    totals,
    sums,
    jobs,
    pieces,
    keys_at,
    spare_at,
    p_like,
    v_like,
    g_like,
    maximize,
    decay,
    as_dense,
    skip_nonfinite,
):
    """Leave in ``sums[part]`` what the rows of this part of a job add to the sums of all columns, and to the others."""
    total_at = address_of(totals) + part * totals.shape[1] * totals.itemsize
    like, p_like, v_like, g_like = borrowed(totals), borrowed(p_like), borrowed(v_like), borrowed(g_like)
    jobs, pieces = borrowed(jobs), borrowed(pieces)
    first, last = (0, jobs.size // JOB_WORDS) if pieces.size == 0 else (pieces[1 + part], pieces[2 + part])
    own = float64s_at(address_of(sums) + part * sums.shape[1] * 8, sums.shape[1])
    for c in range(own.size):
        own[c] = 0.0
    seen = np.int64(0)
    for number in range(first, last):
        job, low, high, keys_from = piece_of(number, jobs, pieces)
        scalars = float64s_at(address_of(job) + SCALARS * 8, 7)
        table = (job, scalars, own, total_at, p_like, v_like, (maximize, decay, as_dense, skip_nonfinite))
        seen = over_gradient(
            job, low, high, keys_from, keys_at, spare_at, total_at, like, g_like,
            _ROWS_AHEAD, ask_for_moment, add_row, table, seen,
        )  # fmt: skip
    own[own.size - SUMS + ROWS] = seen


column_sums = OverThreads(column_sums_part)


@njit(**INLINE)
def ask_for_moment(row, table):
    prefetch(table[0][V_AT] + row * table[5].itemsize, 1)


@njit(**INLINE)
def add_row(row, g, table, seen):
    job, scalars, own, total_at, p_like, v_like, (maximize, decay, as_dense, skip_nonfinite) = table
    if is_left_out(g, skip_nonfinite):
        return seen
    number, columns = g.dtype.type, job[COLUMNS]
    p = row_at(job[P_AT] + row * columns * p_like.itemsize, columns, p_like)
    g = decayed_gradient(g, p, maximize, only_if(decay, scalars[DECAY]), total_at)
    for c in range(g.size):
        own[c] += np.float64(g[c]) * np.float64(g[c])
    v = row_at(job[V_AT] + row * v_like.itemsize, 1, v_like)
    # As the step will compute and store it: the sum of all rows must not drift away from them.
    square, beta2 = number(sum_of_squares(g) / g.size), scalars[BETA2]
    after = narrow(averaged(widen(v[0], g), square, number(beta2), number(1 - beta2), as_dense), v)
    own[columns + BEFORE] += np.float64(widen(v[0], g))
    own[columns + AFTER] += np.float64(widen(after, g))
    return seen + 1

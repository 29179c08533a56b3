"""The row update as one fused loop per row: the equations of ``rowstep._rule``, each operation rounded on its own.

Rows are visited in ascending order. The duplicates of a row are summed in order of occurrence in a buffer that stays in
the cache; then the row's p, m and v are read and written once. Threads take contiguous ranges of rows, balanced by
occurrences, and a row is never shared, so the result has the same bits for any number of threads.

An option that is off arrives as None. Numba types None apart and drops the branches that test for it, so every
combination of options is a kernel of its own, compiled when it is first used.

Names: ``p``, ``m``, ``v`` and ``u`` are the parameter, the moments and amsgrad's maximum, ``g`` the gradient. ``x_at``
is the address where x begins, ``x_like`` an empty array of its element type. ``total`` has the type computed with.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit, prange
from numba.extending import overload

from .bits import CACHE_LINE, INLINE, JIT, borrowed, narrow, prefetch, row_at, widen
from .group import next_row_start

# How many cache lines to have under way. At 64 columns that is 4 rows ahead, at 32 columns 8: the best of 2, 4, 8
# and 16 in each case (10M x 32: 2.2 ms at 2 rows ahead, 1.1 ms at 8).
_LINES_AHEAD = 64


@njit(**JIT, parallel=True)
def update_parallel(totals, keys, shift, *arguments):
    """``update_range`` over all occurrences, in as many pieces as there are rows to sum in, balanced by occurrences."""
    parts = totals.shape[0]
    skipped = 0
    for part in prange(parts):
        first = next_row_start(keys, keys.size * part // parts, np.uint64(shift))
        last = next_row_start(keys, keys.size * (part + 1) // parts, np.uint64(shift))
        skipped += update_range(first, last, totals[part], keys, shift, *arguments)
    return skipped


@njit(**JIT)
def update_range(
    first, last, total, keys, shift, p_at, m_at, v_at, u_at, count_at, g_at, g_stride,
    p_like, m_like, g_like, columns,
    beta1, beta2, eps, step_size, maximize, shrink, decay, corrected_eps, skip_nonfinite,
):  # fmt: skip
    """Update the rows whose occurrences are ``keys[first:last]``; return how many of them were skipped.

    Duplicates are summed in ``total``, an array of one row.
    """
    keys, total, shift = borrowed(keys), borrowed(total), np.uint64(shift)
    p_bytes, m_bytes, g_bytes = columns * p_like.itemsize, columns * m_like.itemsize, columns * g_like.itemsize
    distance = max(2, _LINES_AHEAD // ((p_bytes + 2 * m_bytes + g_bytes) // CACHE_LINE + 1))
    skipped = 0
    ahead, row_ahead = first, np.int64(-1)
    here = first
    while here < last:
        row = np.int64(keys[here] >> shift)
        end = here + 1
        while end < last and np.int64(keys[end] >> shift) == row:
            end += 1

        # Every occurrence is asked for, not only the first of a row: under Zipf ids most of the time is spent on
        # gradient rows that lie in random order.
        while ahead < min(last, end + distance):
            prefetch(g_at + position_of(keys[ahead], shift) * g_stride, g_bytes)
            if np.int64(keys[ahead] >> shift) != row_ahead:
                row_ahead = np.int64(keys[ahead] >> shift)
                prefetch(p_at + row_ahead * p_bytes, p_bytes)
                prefetch(m_at + row_ahead * m_bytes, m_bytes)
                prefetch(v_at + row_ahead * m_bytes, m_bytes)
            ahead += 1

        g = summed_gradient(keys, here, end, shift, g_at, g_stride, g_like, total)
        here = end
        if skip_nonfinite is not None:  # noqa: SIM102  Numba drops a branch only for a bare test against None
            if not all_finite(g):
                skipped += 1
                continue
        row_step_size, row_eps = step_size, eps
        if count_at is not None:
            row_step_size, row_eps = count_row(count_at, row, beta1, beta2, eps, step_size, corrected_eps)
        p = row_at(p_at + row * p_bytes, columns, p_like)
        m = row_at(m_at + row * m_bytes, columns, m_like)
        v = row_at(v_at + row * m_bytes, columns, m_like)
        if u_at is None:
            update_row(p, m, v, None, g, beta1, beta2, row_eps, row_step_size, maximize, shrink, decay)
        else:
            u = row_at(u_at + row * m_bytes, columns, m_like)
            update_row(p, m, v, u, g, beta1, beta2, row_eps, row_step_size, maximize, shrink, decay)
    return skipped


@njit(**INLINE)
def update_row(p, m, v, u, g, beta1, beta2, eps, step_size, maximize, shrink, decay):
    """The equations, for one row. ``g`` has the type computed with."""
    number = g.dtype.type
    one_minus_beta1, one_minus_beta2 = number(1 - beta1), number(1 - beta2)
    eps, step_size = number(eps), number(step_size)
    for c in range(p.size):
        p_c, m_c, v_c, g_c = widen(p[c], g), widen(m[c], g), widen(v[c], g), g[c]
        if maximize is not None:
            g_c = -g_c
        if shrink is not None:
            p_c = p_c * number(shrink)
        if decay is not None:
            g_c = g_c + number(decay) * p_c
        m_c = m_c + (g_c - m_c) * one_minus_beta1
        v_c = v_c + (g_c * g_c - v_c) * one_minus_beta2
        m[c] = narrow(m_c, m)
        v[c] = narrow(v_c, v)
        if u is not None:
            u_c = widen(u[c], g)
            # A NaN on either side stays one, as torch.maximum has it.
            v_c = u_c if u_c > v_c or u_c != u_c else v_c
            u[c] = narrow(v_c, u)
        p[c] = narrow(p_c - step_size * (m_c / (math.sqrt(v_c) + eps)), p)


@njit(**INLINE)
def count_row(count_at, row, beta1, beta2, eps, step_size, corrected_eps):
    """Count a step for this row; return its step size and eps."""
    count = row_at(count_at + row * 8, 1, np.empty(0, np.int64))
    count[0] += 1
    correction2 = math.sqrt(1 - beta2 ** count[0])
    if corrected_eps is not None:
        eps = eps * correction2
    return step_size * correction2 / (1 - beta1 ** count[0]), eps


@njit(**INLINE)
def position_of(key, shift):
    """Where in the gradient an occurrence's values are."""
    return np.int64(key & ((np.uint64(1) << shift) - np.uint64(1)))


@njit(**INLINE)
def sum_occurrences(keys, first, last, shift, g_at, g_stride, g_like, total):
    """The sum of a row's occurrences, in their order, in ``total``."""
    g = row_at(g_at + position_of(keys[first], shift) * g_stride, total.size, g_like)
    for c in range(total.size):
        total[c] = widen(g[c], total)
    for other in range(first + 1, last):
        g = row_at(g_at + position_of(keys[other], shift) * g_stride, total.size, g_like)
        for c in range(total.size):
            total[c] += widen(g[c], total)
    return total


def summed_gradient(keys, first, last, shift, g_at, g_stride, g_like, total):
    """The gradient of one row: its only occurrence where it lies, or the sum of all of them in ``total``."""
    raise RuntimeError("runs in compiled code only")


@overload(summed_gradient, jit_options=INLINE)
def _summed_gradient(keys, first, last, shift, g_at, g_stride, g_like, total):
    def sum_if_many(keys, first, last, shift, g_at, g_stride, g_like, total):
        if last == first + 1:
            return row_at(g_at + position_of(keys[first], shift) * g_stride, total.size, g_like)
        return sum_occurrences(keys, first, last, shift, g_at, g_stride, g_like, total)

    def always_sum(keys, first, last, shift, g_at, g_stride, g_like, total):
        return sum_occurrences(keys, first, last, shift, g_at, g_stride, g_like, total)

    return sum_if_many if g_like.dtype == total.dtype else always_sum


@njit(**INLINE)
def all_finite(g):
    for number in g:  # noqa: SIM110  Numba compiles no generator expressions
        if not math.isfinite(number):
            return False
    return True


@njit(**JIT)
def any_nonfinite(total, keys, shift, g_at, g_stride, g_like):
    """Whether the summed gradient of some row is not finite."""
    keys, total, shift = borrowed(keys), borrowed(total), np.uint64(shift)
    here = 0
    while here < keys.size:
        end = next_row_start(keys, here + 1, shift)
        if not all_finite(summed_gradient(keys, here, end, shift, g_at, g_stride, g_like, total)):
            return True
        here = end
    return False

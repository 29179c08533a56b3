"""The row update as one fused loop per row: the equations of ``rowstep._rule``, each operation rounded on its own.

Rows are visited in ascending order. The duplicates of a row are summed in order of occurrence in a buffer that stays in
the cache; then the row's p, m and v are read and written once. Each thread has a range of rows, balanced by
occurrences, that it sorts and updates on its own. No row is shared, so the result has the same bits for any number of
threads.

An option that is off arrives as None. Numba types None apart and drops the branches that test for it, so every
combination of options is a kernel of its own, compiled when it is first used.

Names: ``p``, ``m``, ``v`` and ``u`` are the parameter, the moments and amsgrad's maximum, ``g`` the gradient. ``x_at``
is the address where x begins, ``x_like`` an empty array of its element type. ``total`` has the type computed with.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from .bits import (
    CACHE_LINE,
    INLINE,
    address_of,
    borrowed,
    has_type_of,
    ids_at,
    narrow,
    optional_row_at,
    prefetch,
    row_at,
    widen,
)
from .cache import kernel
from .group import group, next_row_start, split
from .parallel import call_for_parts

# How many cache lines to have under way, of the gradient and of the tables. At 64 columns that is 4 rows ahead, at 32
# columns 8: the best of 2, 4, 8 and 16 in each case (10M x 32: 2.2 ms at 2 rows ahead, 1.1 ms at 8).
_G_LINES_AHEAD = 64
_TABLE_LINES_AHEAD = 48


@kernel
def update_part(
    part, totals, bounds, rows_at, count, shift, row_bits, keys, spare,
    p_at, m_at, v_at, u_at, count_at, g_at, g_stride,
    p_like, m_like, g_like, columns,
    beta1, beta2, eps, step_size, maximize, shrink, decay, as_dense, skip_nonfinite,
):  # fmt: skip
    """Update the rows of one part, of those that the ``count`` occurrences at ``rows_at`` name.

    ``bounds`` is what ``split`` makes; its third row tells how many rows were skipped. Duplicates are summed in the
    part's row of ``totals``.
    """
    keys, last, total = group_part(part, totals, bounds, rows_at, count, shift, row_bits, keys, spare, columns)
    p_like, m_like, g_like = borrowed(p_like), borrowed(m_like), borrowed(g_like)
    shift = np.uint64(shift)
    p_bytes, m_bytes, g_bytes = columns * p_like.itemsize, columns * m_like.itemsize, columns * g_like.itemsize
    ahead = (
        last, g_at, g_bytes, _G_LINES_AHEAD // (g_bytes // CACHE_LINE + 1) + 1,
        p_at, m_at, v_at, p_bytes, m_bytes, _TABLE_LINES_AHEAD // ((p_bytes + 2 * m_bytes) // CACHE_LINE + 1) + 1,
    )  # fmt: skip
    skipped = 0
    here = np.int64(0)  # a bare 0 has a type of its own, and all that is called with it would be compiled twice
    while here < last:
        row = np.int64(keys[here] >> shift)
        end = next_row_start(keys, last, here + 1, shift)
        g = summed_gradient(keys, here, end, shift, g_at, g_stride, g_like, total, ahead)
        here = end
        if skip_nonfinite is not None:  # noqa: SIM102  Numba drops a branch only for a bare test against None
            if not all_finite(g):
                skipped += 1
                continue
        row_step_size, row_eps = step_size, eps
        if count_at is not None:
            row_step_size, row_eps = count_row(count_at, row, beta1, beta2, eps, step_size, as_dense)
        p = row_at(p_at + row * p_bytes, columns, p_like)
        m = row_at(m_at + row * m_bytes, columns, m_like)
        v = row_at(v_at + row * m_bytes, columns, m_like)
        u = optional_row_at(u_at, row * m_bytes, columns, m_like)
        update_row(p, m, v, u, g, beta1, beta2, row_eps, row_step_size, maximize, shrink, decay, as_dense)
    bounds[2, part] = skipped


@kernel
def update_parallel(pool, threads, totals, bounds, rows_at, count, shift, row_bits, *arguments):
    """``update_part`` for every part that there is a row of ``totals`` for."""
    parts = totals.shape[0]
    split(ids_at(rows_at, count), row_bits, parts, bounds)
    call_for_parts(pool, threads, parts, update_part, (totals, bounds, rows_at, count, shift, row_bits, *arguments))


@njit(**INLINE)
def group_part(part, totals, bounds, rows_at, count, shift, row_bits, keys, spare, columns):
    """The keys of one part of the work, grouped, how many there are, and its row to sum in."""
    offset = bounds[1, part]
    keys = row_at(address_of(keys) + offset * keys.itemsize, keys.size - offset, keys)
    spare = row_at(address_of(spare) + offset * spare.itemsize, spare.size - offset, spare)
    rows = ids_at(rows_at, count)
    last = group(rows, bounds[0, part], bounds[0, part + 1], np.uint64(shift), row_bits, keys, spare)
    return keys, last, row_at(address_of(totals) + part * columns * totals.itemsize, columns, totals)


@njit(**INLINE)
def update_row(p, m, v, u, g, beta1, beta2, eps, step_size, maximize, shrink, decay, as_dense):
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
        if as_dense is not None:
            v_c = v_c * number(beta2) + g_c * g_c * one_minus_beta2
        else:
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
def count_row(count_at, row, beta1, beta2, eps, step_size, as_dense):
    """Count a step for this row; return its step size and eps."""
    count = row_at(count_at + row * 8, 1, np.empty(0, np.int64))
    count[0] += 1
    correction2 = math.sqrt(1 - beta2 ** count[0])
    if as_dense is not None:
        eps = eps * correction2
    return step_size * correction2 / (1 - beta1 ** count[0]), eps


@njit(**INLINE)
def position_of(key, shift):
    """Where in the gradient an occurrence's values are."""
    return np.int64(key & ((np.uint64(1) << shift) - np.uint64(1)))


@njit(**INLINE)
def look_ahead(keys, here, shift, g_stride, ahead):
    """Ask for the memory that the occurrences after this one will need.

    Every occurrence's gradient is asked for, not only the first of a row: under Zipf ids most of the time goes into
    gradient rows that lie in random order.
    """
    last, g_at, g_bytes, g_distance, p_at, m_at, v_at, p_bytes, m_bytes, row_distance = ahead
    there = here + g_distance
    if there < last:
        prefetch(g_at + position_of(keys[there], shift) * g_stride, g_bytes)
    there = here + row_distance
    if there < last:
        row = np.int64(keys[there] >> shift)
        if row != np.int64(keys[there - 1] >> shift):
            prefetch(p_at + row * p_bytes, p_bytes)
            prefetch(m_at + row * m_bytes, m_bytes)
            prefetch(v_at + row * m_bytes, m_bytes)


@njit(**INLINE)
def summed_gradient(keys, first, last, shift, g_at, g_stride, g_like, total, ahead):
    """The gradient of one row: its only occurrence where it lies, or the sum of all of them, in order, in ``total``."""
    for here in range(first, last):
        if ahead is not None:
            look_ahead(keys, here, shift, g_stride, ahead)
        g_at_here = g_at + position_of(keys[here], shift) * g_stride
        if last == first + 1 and has_type_of(g_like, total):
            return row_at(g_at_here, total.size, total)
        g = row_at(g_at_here, total.size, g_like)
        if here == first:
            for c in range(total.size):
                total[c] = widen(g[c], total)
        else:
            for c in range(total.size):
                total[c] += widen(g[c], total)
    return total


@njit(**INLINE)
def all_finite(g):
    for number in g:  # noqa: SIM110  Numba compiles no generator expressions
        if not math.isfinite(number):
            return False
    return True


@kernel
def any_nonfinite(total, row_count, rows_at, rows_count, shift, row_bits, keys, spare, g_at, g_stride, g_like):
    """Whether the summed gradient of some row is not finite."""
    shift = np.uint64(shift)
    total, keys, g_like = borrowed(total), borrowed(keys), borrowed(g_like)
    count = group(ids_at(rows_at, rows_count), 0, row_count, shift, row_bits, keys, spare)
    here = np.int64(0)
    while here < count:
        end = next_row_start(keys, count, here + 1, shift)
        if not all_finite(summed_gradient(keys, here, end, shift, g_at, g_stride, g_like, total, None)):
            return True
        here = end
    return False

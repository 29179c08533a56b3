"""A row's deferred steps, taken in one stride: the kernels. ``rowstep._deferred`` derives what they compute.

No sorting here: ``since`` says for every row at which step it was last up to date, and a row that has just been brought
up to date is passed over when its id comes again. Threads share the rows by their number, so no two meet.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from .._schedule import COLUMNS, DUST_OF_EPS, EBAR, M0, M2, M3, M4, M5, SAFE
from .bits import INLINE, address_of, borrowed, ids_at, narrow, optional_row_at, prefetch, row_at, widen
from .cache import kernel
from .parallel import call_for_parts

_ROWS_AHEAD = 8
_SINCE_AHEAD = 32


@kernel
def catch_up_ids(
    part, scratch, ids_from, count, since, p_at, m_at, v_at, u_at, p_like, m_like, columns,
    step, window, frozen, rate, root, decayed, beta1_powers, beta2_powers, ratio, growth, eps,
):  # fmt: skip
    """Bring the rows up to date that ``count`` ids name, and that belong to this part of the work."""
    ids = ids_at(ids_from, count)
    parts = scratch.shape[0]
    p_bytes, m_bytes = columns * p_like.itemsize, columns * m_like.itemsize
    since_at = address_of(since)
    sums, roots = scratch_rows(scratch, part)
    since, p_like, m_like = borrowed(since), borrowed(p_like), borrowed(m_like)
    schedule = (
        step, borrowed(window), borrowed(frozen), borrowed(rate), borrowed(root), borrowed(decayed),
        borrowed(beta1_powers), borrowed(beta2_powers), ratio, growth, eps,
    )  # fmt: skip
    for position in range(ids.size):
        if position + _SINCE_AHEAD < ids.size:
            prefetch(since_at + ids[position + _SINCE_AHEAD] * since.itemsize, 1)
        if position + _ROWS_AHEAD < ids.size:
            ahead = ids[position + _ROWS_AHEAD]
            if since[ahead] != step and ahead % parts == part:
                prefetch(p_at + ahead * p_bytes, p_bytes)
                prefetch(m_at + ahead * m_bytes, m_bytes)
                prefetch(v_at + ahead * m_bytes, m_bytes)
        row = ids[position]
        if row % parts == part and since[row] != step:
            catch_up_row(row, sums, roots, since, p_at, m_at, v_at, u_at, p_like, m_like, columns, schedule)


@kernel
def catch_up_range(
    part, scratch, first, last, since, p_at, m_at, v_at, u_at, p_like, m_like, columns,
    step, window, frozen, rate, root, decayed, beta1_powers, beta2_powers, ratio, growth, eps,
):  # fmt: skip
    """Bring those of the rows first..last-1 up to date that belong to this part of the work."""
    parts = scratch.shape[0]
    start, stop = first + (last - first) * part // parts, first + (last - first) * (part + 1) // parts
    sums, roots = scratch_rows(scratch, part)
    since, p_like, m_like = borrowed(since), borrowed(p_like), borrowed(m_like)
    schedule = (
        step, borrowed(window), borrowed(frozen), borrowed(rate), borrowed(root), borrowed(decayed),
        borrowed(beta1_powers), borrowed(beta2_powers), ratio, growth, eps,
    )  # fmt: skip
    for row in range(start, stop):
        if since[row] != step:
            catch_up_row(row, sums, roots, since, p_at, m_at, v_at, u_at, p_like, m_like, columns, schedule)


@kernel
def catch_up_ids_parallel(pool, threads, scratch, *arguments):
    """``catch_up_ids`` for every part that there is scratch memory for."""
    call_for_parts(pool, threads, scratch.shape[0], catch_up_ids, (scratch, *arguments))


@kernel
def catch_up_range_parallel(pool, threads, scratch, *arguments):
    """``catch_up_range`` for every part that there is scratch memory for."""
    call_for_parts(pool, threads, scratch.shape[0], catch_up_range, (scratch, *arguments))


@njit(**INLINE)
def scratch_rows(scratch, part):
    """The two rows of scratch memory that belong to this part."""
    columns = scratch.shape[2]
    start, size = address_of(scratch) + 2 * part * columns * scratch.itemsize, columns * scratch.itemsize
    return row_at(start, columns, scratch), row_at(start + size, columns, scratch)


@njit(**INLINE)
def catch_up_row(row, sums, roots, since, p_at, m_at, v_at, u_at, p_like, m_like, columns, schedule):
    """Take all the steps that this row has missed."""
    step, window, frozen, rate, root, decayed, beta1_powers, beta2_powers, ratio, growth, eps = schedule
    capacity, length = rate.size, window.shape[0] - 1
    start = np.int64(since[row])
    gap = step - start
    since[row] = step
    now = decayed[step % capacity]
    kept, aged = math.exp(now - decayed[start % capacity]), 1.0
    if gap <= length:
        terms = row_at(address_of(window) + gap * COLUMNS * 8, COLUMNS, window)
    else:
        terms = row_at(address_of(frozen) + start % capacity * COLUMNS * 8, COLUMNS, frozen)
        aged = math.exp(now - decayed[(start + length) % capacity])
    p = row_at(p_at + row * columns * p_like.itemsize, columns, p_like)
    m = row_at(m_at + row * columns * m_like.itemsize, columns, m_like)
    v = row_at(v_at + row * columns * m_like.itemsize, columns, m_like)
    beta1_power, beta1_rest = factors(beta1_powers[gap], sums)
    beta2_power, beta2_rest = factors(beta2_powers[gap], sums)
    dust = sums.dtype.type(min(smallest_normal(sums), eps * DUST_OF_EPS))
    # Under amsgrad the largest second moment divides, and it does not decay. Without it u is None, and not v under
    # another name: LLVM would find the two overlap and fall back to one number at a time (315 ns a row, not 60).
    u = optional_row_at(u_at, row * columns * m_like.itemsize, columns, m_like)
    if is_safe(m, v, u, terms[SAFE], sums):
        stride_by_series(p, m, v, u, sums, terms, aged, kept, beta1_power, beta2_power, dust)
    else:
        count = min(gap, length)
        sum_moves(sums, roots, m, v, u, step, start, count, rate, root, decayed, ratio, growth, eps)
        stride_by_sums(p, m, v, sums, kept, beta1_power, beta2_power, dust)
    if beta1_rest != 1 or beta2_rest != 1:
        decay_again(m, v, beta1_rest, beta2_rest, dust, sums)


@njit(**INLINE)
def divisor(v, u, c, like):
    """The second moment that divides."""
    return widen(v[c], like) if u is None else widen(u[c], like)


@njit(**INLINE)
def is_safe(m, v, u, bound, like):
    """Whether the series is good enough for every number of this row that still moves."""
    unsafe = False
    if bound > 0:
        least = like.dtype.type(bound)
        for c in range(m.size):
            unsafe |= (divisor(v, u, c, like) <= least) & (widen(m[c], like) != 0)
    return not unsafe


@njit(**INLINE)
def stride_by_series(p, m, v, u, like, terms, aged, kept, beta1_power, beta2_power, dust):
    """The whole stride, with the sum expanded around the mean of e.

    The mean is never 0, and m is divided before anything else: where m is 0, nothing but weight decay moves p.
    """
    number = like.dtype.type
    mean, m0 = number(max(terms[EBAR], smallest_normal(like))), number(terms[M0] * aged)
    m2, m3, m4, m5 = (
        number(terms[M2] * aged), number(terms[M3] * aged), number(terms[M4] * aged), number(terms[M5] * aged)
    )  # fmt: skip
    one, zero, kept = number(1), number(0), number(kept)
    for c in range(p.size):
        m_c, v_c = widen(m[c], like), widen(v[c], like)
        inverse = one / (math.sqrt(divisor(v, u, c, like)) + mean)
        theta = mean * inverse
        total = m0 + theta * theta * (m2 - theta * (m3 - theta * (m4 - theta * m5)))
        p[c] = narrow(kept * widen(p[c], like) - m_c * inverse * total, p)
        m[c] = narrow(without_dust(m_c * beta1_power, dust, zero), m)
        v[c] = narrow(v_c * beta2_power, v)


@njit(**INLINE)
def sum_moves(sums, roots, m, v, u, step, start, count, rate, root, decayed, ratio, growth, eps):
    """The moves one by one: where the series is not good enough. Here too e is never 0 and m is divided first."""
    number = sums.dtype.type
    for c in range(sums.size):
        sums[c] = number(0)
        roots[c] = math.sqrt(divisor(v, u, c, sums))
    capacity = rate.size
    for j in range(1, count + 1):
        slot = (start + j) % capacity
        weight = number(rate[slot] * math.exp(decayed[step % capacity] - decayed[slot]) * ratio**j)
        e = number(max(eps * root[slot] * growth**j, smallest_normal(sums)))
        for c in range(sums.size):
            sums[c] += weight * (widen(m[c], sums) / (roots[c] + e))


@njit(**INLINE)
def stride_by_sums(p, m, v, sums, kept, beta1_power, beta2_power, dust):
    number = sums.dtype.type
    kept, zero = number(kept), number(0)
    for c in range(p.size):
        m_c = widen(m[c], sums)
        p[c] = narrow(kept * widen(p[c], sums) - sums[c], p)
        m[c] = narrow(without_dust(m_c * beta1_power, dust, zero), m)
        v[c] = narrow(widen(v[c], sums) * beta2_power, v)


@njit(**INLINE)
def without_dust(momentum, dust, zero):
    """The momentum, or 0 if it is too small to move anything."""
    return zero if abs(momentum) < dust else momentum


@njit(**INLINE)
def smallest_normal(like):
    """The smallest number that has all its digits."""
    return 2.0**-126 if like.itemsize == 4 else 2.0**-1022


@njit(**INLINE)
def factors(power, like):
    """A power of a beta as two factors that the type computed with can hold; nearly always the second is 1.

    1e-46 is 0 in float32, but 1e24 times 1e-46 is not. And no factor is 0: an infinite moment stays infinite, as it
    does step by step.
    """
    number = like.dtype.type
    if power >= smallest_normal(like):
        return number(power), number(1)
    smallest = 2.0**-149 if like.itemsize == 4 else 2.0**-1074
    half = number(max(math.sqrt(power), smallest))
    return half, half


@njit(**INLINE)
def decay_again(m, v, beta1_power, beta2_power, dust, like):
    """What the second factors leave of the moments."""
    zero = like.dtype.type(0)
    for c in range(m.size):
        m[c] = narrow(without_dust(widen(m[c], like) * beta1_power, dust, zero), m)
        v[c] = narrow(widen(v[c], like) * beta2_power, v)


@kernel
def count_stale(since, rows_at, count, step):
    """How many of these row numbers name a row that is not up to date."""
    stale = 0
    for row in ids_at(rows_at, count):
        stale += since[row] != step
    return stale


@kernel
def mark(since, rows_at, count, step):
    """Note that these rows are up to date at this step."""
    for row in ids_at(rows_at, count):
        since[row] = step

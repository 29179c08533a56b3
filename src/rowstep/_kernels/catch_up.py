"""A row's deferred steps, made up for in one update: the kernels. ``rowstep._deferred`` derives what they compute.

No sorting here: ``notes`` says for every row at which step it was last up to date, and a row that has just been brought
up to date is passed over when its id comes again. Threads share the rows by their number, so no two meet.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from .._schedule import (
    BETA1_POWERS_AT,
    BETA2_POWERS_AT,
    CAPACITY,
    COLUMNS,
    DECAYED_AT,
    DUST_OF_EPS,
    EBAR,
    EPS,
    FROZEN_AT,
    GROWTH,
    LENGTH,
    M0,
    M2,
    M3,
    M4,
    M5,
    RATE_AT,
    RATIO,
    ROOT_AT,
    SAFE,
    SCALARS,
    STEP,
    WINDOW_AT,
)
from . import INLINE
from .cache import kernel
from .floats import narrow, widen
from .memory import (
    address_of,
    borrowed,
    float64s_at,
    int32s_at,
    int64s_at,
    is_there,
    optional_row_at,
    prefetch,
    row_at,
    unless,
)
from .pool import OverThreads
from .rounding import state_key, stored_first, stored_second, weights_key
from .rows import first_outside

_ROWS_AHEAD = 8
_NOTES_AHEAD = 32


@kernel
def catch_up_ids_part(
    part, scratch, ids_at, count,
    row_count, notes_at, p_at, m_at, v_at, u_at, columns, schedule, key, p_like, m_like, v_like,
    momentum, by_row, amsgrad, rounds_state, rounds_weights,
):  # fmt: skip
    """Bring the rows up to date that ``count`` ids name, and that belong to this part of the work.

    If an id is outside the table, nothing is done; its position is returned, and else -1.
    """
    position = first_outside(ids_at, count, row_count)
    if position >= 0:
        return position
    ids = int64s_at(ids_at, count)
    parts, notes, step = scratch.shape[0] // 2, int32s_at(notes_at, row_count), schedule[STEP]
    sums, roots = scratch_rows(scratch, part)
    p_like, m_like, v_like = borrowed(p_like), borrowed(m_like), borrowed(v_like)
    schedule = borrowed(schedule)
    p_bytes, m_bytes = columns * p_like.itemsize, columns * m_like.itemsize
    v_bytes = (np.int64(1) if is_there(by_row) else columns) * v_like.itemsize
    places = (p_at, m_at, v_at, u_at, v_bytes, columns, p_like, m_like, v_like)
    options = (momentum, amsgrad, rounds_state, rounds_weights)
    for position in range(ids.size):
        if position + _NOTES_AHEAD < ids.size:
            prefetch(notes_at + ids[position + _NOTES_AHEAD] * 4, 1)
        if position + _ROWS_AHEAD < ids.size:
            ahead = ids[position + _ROWS_AHEAD]
            if notes[ahead] < step and ahead % parts == part:
                prefetch(p_at + ahead * p_bytes, p_bytes)
                if is_there(momentum):
                    prefetch(m_at + ahead * m_bytes, m_bytes)
                prefetch(v_at + ahead * v_bytes, v_bytes)
        row = ids[position]
        if row % parts == part and notes[row] < step:
            catch_up_row(row, sums, roots, notes, places, schedule, key, by_row, options)
    return -1


@kernel
def catch_up_range_part(
    part, scratch, first, last,
    row_count, notes_at, p_at, m_at, v_at, u_at, columns, schedule, key, p_like, m_like, v_like,
    momentum, by_row, amsgrad, rounds_state, rounds_weights,
):  # fmt: skip
    """Bring those of the rows first..last-1 up to date that belong to this part of the work."""
    parts, notes, step = scratch.shape[0] // 2, int32s_at(notes_at, row_count), schedule[STEP]
    start, stop = first + (last - first) * part // parts, first + (last - first) * (part + 1) // parts
    sums, roots = scratch_rows(scratch, part)
    p_like, m_like, v_like = borrowed(p_like), borrowed(m_like), borrowed(v_like)
    schedule = borrowed(schedule)
    v_bytes = (np.int64(1) if is_there(by_row) else columns) * v_like.itemsize
    places = (p_at, m_at, v_at, u_at, v_bytes, columns, p_like, m_like, v_like)
    options = (momentum, amsgrad, rounds_state, rounds_weights)
    for row in range(start, stop):
        if notes[row] < step:  # it may be ahead, in a step that is made and not counted yet
            catch_up_row(row, sums, roots, notes, places, schedule, key, by_row, options)


catch_up_ids, catch_up_range = OverThreads(catch_up_ids_part), OverThreads(catch_up_range_part)


@njit(**INLINE)
def scratch_rows(scratch, part):
    """The two rows of scratch memory that belong to this part."""
    columns = scratch.shape[1]
    start, size = address_of(scratch) + 2 * part * columns * scratch.itemsize, columns * scratch.itemsize
    return row_at(start, columns, scratch), row_at(start + size, columns, scratch)


@njit(**INLINE)
def catch_up_row(row, sums, roots, notes, places, schedule, key, by_row, options):
    """Take all the steps that this row has missed."""
    p_at, m_at, v_at, u_at, v_bytes, columns, p_like, m_like, v_like = places
    momentum, amsgrad, rounds_state, rounds_weights = options
    step, length, capacity = schedule[STEP], schedule[LENGTH], schedule[CAPACITY]
    decayed = float64s_at(schedule[DECAYED_AT], capacity)
    eps = float64s_at(address_of(schedule) + SCALARS * 8, 3)[EPS]
    start = np.int64(notes[row])
    gap = step - start
    notes[row] = step
    now = decayed[step % capacity]
    kept, aged = math.exp(now - decayed[start % capacity]), 1.0
    if gap <= length:
        terms = float64s_at(schedule[WINDOW_AT] + gap * COLUMNS * 8, COLUMNS)
    else:
        terms = float64s_at(schedule[FROZEN_AT] + start % capacity * COLUMNS * 8, COLUMNS)
        aged = math.exp(now - decayed[(start + length) % capacity])
    p = row_at(p_at + row * columns * p_like.itemsize, columns, p_like)
    m = optional_row_at(momentum, m_at + row * columns * m_like.itemsize, columns, m_like)
    v = row_at(v_at + row * v_bytes, np.int64(1) if is_there(by_row) else columns, v_like)
    keys = state_key(row, key, rounds_state), weights_key(row, key, rounds_weights)
    beta1_power, beta1_rest = factors(float64s_at(schedule[BETA1_POWERS_AT], capacity + 1)[gap], sums)
    beta2_power, beta2_rest = factors(float64s_at(schedule[BETA2_POWERS_AT], capacity + 1)[gap], sums)
    dust = sums.dtype.type(min(smallest_normal(sums), eps * DUST_OF_EPS))
    # Under amsgrad the largest second moment divides, and it does not decay. Without it u is None, and not v under
    # another name: LLVM would find the two overlap and fall back to one number at a time (315 ns a row, not 60).
    u = optional_row_at(amsgrad, u_at + row * v_bytes, columns, v_like)
    path = (start, min(gap, length), terms, aged, kept, schedule)
    powers = (beta1_power, beta1_rest, beta2_power, beta2_rest, dust)
    catch_up_either(p, m, v, u, sums, roots, by_row, unless(by_row), path, powers, keys)


@njit(**INLINE)
def catch_up_either(p, m, v, u, sums, roots, by_row, by_element, path, powers, keys):
    if by_element is not None:
        catch_up_elements(p, m, v, u, sums, roots, path, powers, keys)
    if by_row is not None:
        catch_up_by_row(p, m, v, sums, path, powers, keys)


@njit(**INLINE)
def catch_up_elements(p, m, v, u, sums, roots, path, powers, keys):
    """Take the missed steps of a row that has a second moment for each of its numbers."""
    start, count, terms, aged, kept, schedule = path
    beta1_power, beta1_rest, beta2_power, beta2_rest, dust = powers
    if is_safe(m, v, u, terms[SAFE], sums):
        catch_up_by_series(p, m, v, u, sums, terms, aged, kept, beta1_power, beta2_power, dust, keys)
    else:
        sum_moves(sums, roots, m, v, u, start, count, schedule)
        catch_up_by_sums(p, m, v, sums, kept, beta1_power, beta2_power, dust, keys)
    if beta1_rest != 1 or beta2_rest != 1:
        decay_again(m, v, beta1_rest, beta2_rest, dust, sums)


@njit(**INLINE)
def catch_up_by_row(p, m, v, like, path, powers, keys):
    """Take the missed steps of a row that has one second moment. Without momentum there is but weight decay to do."""
    start, count, terms, aged, kept, schedule = path
    beta1_power, beta1_rest, beta2_power, beta2_rest, dust = powers
    if m is not None:
        move, scale = move_by_row(m, v, like, terms, aged, start, count, schedule)
        catch_up_with_move(p, m, move, scale, like, kept, beta1_power, beta1_rest, dust, keys)
    if m is None and kept != 1:
        shrink_row(p, like, kept, keys[1])
    v[0] = narrow(widen(v[0], like) * beta2_power * beta2_rest, v)


@njit(**INLINE)
def move_by_row(m, v, like, terms, aged, start, count, schedule):
    """What multiplies the momentum of a whole row, whose second moment is one number, as a product of two factors.

    The first is what it is divided by, so that nothing overflows that is multiplied by it first.
    """
    second = np.float64(widen(v[0], like))
    root, smallest = math.sqrt(second), smallest_normal(like)
    if terms[SAFE] <= 0 or not second <= terms[SAFE] or is_zero(m, like):
        mean = max(terms[EBAR], smallest)
        theta = mean / (root + mean)
        series = terms[M2] - theta * (terms[M3] - theta * (terms[M4] - theta * terms[M5]))
        return 1 / (root + mean), aged * (terms[M0] + theta * theta * series)
    step, capacity, total = schedule[STEP], schedule[CAPACITY], 0.0
    rate, decay_so_far = float64s_at(schedule[RATE_AT], capacity), float64s_at(schedule[DECAYED_AT], capacity)
    correction = float64s_at(schedule[ROOT_AT], capacity)
    scalars = float64s_at(address_of(schedule) + SCALARS * 8, 3)
    for j in range(1, count + 1):
        slot = (start + j) % capacity
        weight = rate[slot] * math.exp(decay_so_far[step % capacity] - decay_so_far[slot]) * scalars[RATIO] ** j
        e = max(scalars[EPS] * correction[slot] * scalars[GROWTH] ** j, smallest)
        total += weight * ((root + smallest) / (root + e))
    return 1 / (root + smallest), total


@njit(**INLINE)
def is_zero(m, like):
    for c in range(m.size):  # noqa: SIM110  Numba compiles no generator expressions
        if widen(m[c], like) != 0:
            return False
    return True


@njit(**INLINE)
def catch_up_with_move(p, m, move, scale, like, kept, beta1_power, beta1_rest, dust, keys):
    number = like.dtype.type
    move, scale, kept, zero = number(move), number(scale), number(kept), number(0)
    for c in range(p.size):
        m_c = widen(m[c], like)
        p[c] = stored_first(kept * widen(p[c], like) - m_c * move * scale, p, keys[1], c)
        m[c] = stored_first(without_dust(m_c * beta1_power * beta1_rest, dust, zero), m, keys[0], c)


@njit(**INLINE)
def shrink_row(p, like, kept, key):
    """Weight decay alone."""
    kept = like.dtype.type(kept)
    for c in range(p.size):
        p[c] = stored_first(kept * widen(p[c], like), p, key, c)


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
def catch_up_by_series(p, m, v, u, like, terms, aged, kept, beta1_power, beta2_power, dust, keys):
    """All missed steps at once, with the sum expanded around the mean of e.

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
        p[c] = stored_first(kept * widen(p[c], like) - m_c * inverse * total, p, keys[1], c)
        m[c] = stored_first(without_dust(m_c * beta1_power, dust, zero), m, keys[0], c)
        v[c] = stored_second(v_c * beta2_power, v, keys[0], c)


@njit(**INLINE)
def sum_moves(sums, roots, m, v, u, start, count, schedule):
    """The moves one by one: where the series is not good enough. Here too e is never 0 and m is divided first."""
    number, step, capacity = sums.dtype.type, schedule[STEP], schedule[CAPACITY]
    rate, root = float64s_at(schedule[RATE_AT], capacity), float64s_at(schedule[ROOT_AT], capacity)
    decayed = float64s_at(schedule[DECAYED_AT], capacity)
    scalars = float64s_at(address_of(schedule) + SCALARS * 8, 3)
    ratio, growth, eps = scalars[RATIO], scalars[GROWTH], scalars[EPS]
    for c in range(sums.size):
        sums[c] = number(0)
        roots[c] = math.sqrt(divisor(v, u, c, sums))
    for j in range(1, count + 1):
        slot = (start + j) % capacity
        weight = number(rate[slot] * math.exp(decayed[step % capacity] - decayed[slot]) * ratio**j)
        e = number(max(eps * root[slot] * growth**j, smallest_normal(sums)))
        for c in range(sums.size):
            sums[c] += weight * (widen(m[c], sums) / (roots[c] + e))


@njit(**INLINE)
def catch_up_by_sums(p, m, v, sums, kept, beta1_power, beta2_power, dust, keys):
    number = sums.dtype.type
    kept, zero = number(kept), number(0)
    for c in range(p.size):
        m_c = widen(m[c], sums)
        p[c] = stored_first(kept * widen(p[c], sums) - sums[c], p, keys[1], c)
        m[c] = stored_first(without_dust(m_c * beta1_power, dust, zero), m, keys[0], c)
        v[c] = stored_second(widen(v[c], sums) * beta2_power, v, keys[0], c)


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
def look_at_ids(ids_at, count, row_count, notes_at, step):
    """The position of the first id that is not in the table, or else -1 - n if n of them name a row that waits."""
    position = first_outside(ids_at, count, row_count)
    if position >= 0:
        return position
    notes, stale = int32s_at(notes_at, row_count), 0
    for row in int64s_at(ids_at, count):
        stale += notes[row] < step
    return -1 - stale

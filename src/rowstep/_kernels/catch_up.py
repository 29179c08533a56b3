"""A row's deferred steps, made up for in one update: the kernels. ``rowstep._deferred`` derives what they compute.

No sorting here: ``notes`` says for every row at which step it was last up to date, and a row that has just been brought
up to date is passed over when its id comes again. Threads share the rows by their number, so no two meet.

Flat, and made for each kind, as ``rows`` is.
"""

from __future__ import annotations  # noqa: I001  a timeline's words on a few lines

import functools
import math
from typing import Any, NamedTuple

import numpy as np
from numba import njit, types

from .._schedule import (
    BETA1_POWERS_AT, BETA2_POWERS_AT, CAPACITY, COARSE, COEFFICIENTS, DUST_OF_EPS, EBAR, EPS, FINE, FROZEN_AT, GROWTH,
    KEPT, LENGTH, LOG_KEPT_AT, M0, M2, M3, M4, M5, RATE_AT, RATIO, ROOT_AT, SCALARS, UNSAFE_UP_TO,
)  # fmt: skip
from . import INLINE
from .cache import kernel
from .floats import narrow, store, widen
from .job import COLUMNS, M_AT, NOTES_AT, P_AT, TABLE_FROM, TABLE_WORDS, U_AT, V_AT
from .pointers import pointer, prefetch
from .pool import OverThreads
from .rounding import bits_of

# What the kernel is told, in front of the table's words of a job. Behind those, each part has two rows to compute in.
PARTS, IDS_AT, FIRST, LAST, STEP, WINDOW_AT, TIMELINE_AT, KEY, ROW_BYTES = range(9)
TOLD_WORDS = 9

_ROWS_AHEAD = 8
_NOTES_AHEAD = 32


class Kind(NamedTuple):
    """What a kernel is made for; an option that is off is None."""

    p: Any
    m: Any
    v: Any
    number: Any
    """The types of what is stored, and of what is computed with."""
    momentum: Any = True
    by_row: Any = None
    amsgrad: Any = None
    rounds_state: Any = None
    rounds_weights: Any = None

    @property
    def name(self) -> str:
        """For the file that the kernel is kept in."""
        options = [name for name, on in zip(self._fields[4:], self[4:], strict=True) if on is not None]
        return "-".join(["catch_up", *map(str, self[:4]), *options])


@functools.cache
def catching_up(kind: Kind) -> OverThreads:
    """The kernel of a kind, to be called for all parts of the work."""
    P, M, V, N = kind[:4]  # noqa: N806
    momentum, by_row, amsgrad, rounds_state, rounds_weights = kind[4:]
    is_by_row, has_momentum, has_maximum = by_row is not None, momentum is not None, amsgrad is not None
    p_size, m_size, v_size, n_size = (each.bitwidth // 8 for each in kind[:4])
    state_key, _, state_bits, second_bits = bits_of(rounds_state)
    _, weights_key, weights_bits, _ = bits_of(rounds_weights)
    # The smallest number that has all its digits, and the smallest of all.
    normal, tiny = (2.0**-126, 2.0**-149) if n_size == 4 else (2.0**-1022, 2.0**-1074)

    def catch_up_part(part, told_at):
        """Bring rows first..last-1 up to date or, where there are ids, the rows that ids first..last-1 name.

        If an id is outside of the table, nothing is done, and 0 is returned.
        """
        told, table = pointer(told_at, types.int64), pointer(told_at + TOLD_WORDS * 8, types.int64)
        parts, ids_at, first, last, step, key = (
            told[PARTS],
            told[IDS_AT],
            told[FIRST],
            told[LAST],
            told[STEP],
            told[KEY],
        )
        timeline_at, window_at, notes_at = told[TIMELINE_AT], told[WINDOW_AT], table[NOTES_AT - TABLE_FROM]
        p_at, m_at = table[P_AT - TABLE_FROM], table[M_AT - TABLE_FROM]
        v_at, u_at = table[V_AT - TABLE_FROM], table[U_AT - TABLE_FROM]
        columns = table[COLUMNS - TABLE_FROM]
        words = pointer(timeline_at, types.int64)
        scalars = pointer(timeline_at + SCALARS * 8, types.float64)
        length, capacity = words[LENGTH], words[CAPACITY]
        log_kept, rate = pointer(words[LOG_KEPT_AT], types.int64), pointer(words[RATE_AT], types.float64)
        correction = pointer(words[ROOT_AT], types.float64)
        beta1_powers = pointer(words[BETA1_POWERS_AT], types.float64)
        beta2_powers = pointer(words[BETA2_POWERS_AT], types.float64)
        notes, ids = pointer(notes_at, types.int32), pointer(ids_at, types.int64)
        sums_at = told_at + (TOLD_WORDS + TABLE_WORDS) * 8 + 2 * part * told[ROW_BYTES]
        sums, roots = pointer(sums_at, N), pointer(sums_at + told[ROW_BYTES], N)
        p_bytes, m_bytes, v_bytes = columns * p_size, columns * m_size, (1 if is_by_row else columns) * v_size
        dust, zero, one = N(min(normal, scalars[EPS] * DUST_OF_EPS)), N(0), N(1)
        now_coarse, now_fine = log_kept[2 * (step % capacity)], log_kept[2 * (step % capacity) + 1]
        if ids_at != 0:
            outside, limit = np.uint64(0), np.uint64(table[0])
            for position in range(first, last):
                outside |= np.uint64(np.uint64(ids[position]) >= limit)
            if outside:
                return 0
        else:
            first, last = first + (last - first) * part // parts, first + (last - first) * (part + 1) // parts
        for position in range(first, last):
            row = np.int64(position)
            if ids_at != 0:
                row = ids[position]
                if position + _NOTES_AHEAD < last:
                    prefetch(notes_at + ids[position + _NOTES_AHEAD] * 4, 1)
                if position + _ROWS_AHEAD < last:
                    ahead = ids[position + _ROWS_AHEAD]
                    if notes[ahead] < step and ahead % parts == part:
                        prefetch(p_at + ahead * p_bytes, p_bytes)
                        if has_momentum:
                            prefetch(m_at + ahead * m_bytes, m_bytes)
                        prefetch(v_at + ahead * v_bytes, v_bytes)
                if row % parts != part:
                    continue
            if notes[row] >= step:
                continue

            # What the row has missed: its coefficients, and what decay leaves of its weights and moments.
            start = np.int64(notes[row])
            gap = step - start
            notes[row] = np.int32(step)
            aged, count = 1.0, min(gap, length)
            terms = pointer(window_at + count * COEFFICIENTS * 8, types.float64)
            if gap > length:
                terms = pointer(words[FROZEN_AT] + start % capacity * COEFFICIENTS * 8, types.float64)
                aged = kept_since(log_kept, now_coarse, now_fine, (start + length) % capacity)
            kept = terms[KEPT] * aged
            p, m = pointer(p_at + row * p_bytes, P), pointer(m_at + row * m_bytes, M)
            v, u = pointer(v_at + row * v_bytes, V), pointer(u_at + row * v_bytes, V)
            m_key, p_key = state_key(row, key), weights_key(row, key)
            # A power of a beta as two factors that N can hold; nearly always the second is 1. 1e-46 is 0 in float32,
            # but 1e24 times 1e-46 is not. And no factor is 0: an infinite moment stays infinite, as it does step by
            # step.
            power1, power2 = beta1_powers[gap], beta2_powers[gap]
            beta1_power, beta1_rest, beta2_power, beta2_rest = N(power1), one, N(power2), one
            if power1 < normal:
                beta1_power = beta1_rest = N(max(math.sqrt(power1), tiny))
            if power2 < normal:
                beta2_power = beta2_rest = N(max(math.sqrt(power2), tiny))
            kept_n = N(kept)

            if is_by_row and not has_momentum:  # there is but weight decay to do
                if kept != 1:
                    for c in range(columns):
                        store(p, c, kept_n * widen(p[c], N), P, weights_bits(p_key, c))
            elif is_by_row:
                # One factor multiplies the momentum of the whole row, as a product of two: the first is what it is
                # divided by, so that nothing overflows that is multiplied by it first.
                second = np.float64(widen(v[0], N))
                root, is_still = math.sqrt(second), True
                for c in range(columns):
                    is_still &= widen(m[c], N) == zero
                if terms[UNSAFE_UP_TO] <= 0 or not second <= terms[UNSAFE_UP_TO] or is_still:
                    mean = max(terms[EBAR], normal)
                    theta = mean / (root + mean)
                    series = terms[M2] - theta * (terms[M3] - theta * (terms[M4] - theta * terms[M5]))
                    move, scale = 1 / (root + mean), aged * (terms[M0] + theta * theta * series)
                else:
                    move, scale = 1 / (root + normal), 0.0
                    for j in range(1, count + 1):
                        slot = (start + j) % capacity
                        weight = rate[slot] * kept_since(log_kept, now_coarse, now_fine, slot) * scalars[RATIO] ** j
                        e = max(scalars[EPS] * correction[slot] * scalars[GROWTH] ** j, normal)
                        scale += weight * ((root + normal) / (root + e))
                move_n, scale_n = N(move), N(scale)
                for c in range(columns):
                    m_c = widen(m[c], N)
                    store(p, c, kept_n * widen(p[c], N) - m_c * move_n * scale_n, P, weights_bits(p_key, c))
                    m_c = m_c * beta1_power * beta1_rest
                    store(m, c, zero if abs(m_c) < dust else m_c, M, state_bits(m_key, c))
            else:
                # Whether the series is good enough for every number of this row that still moves. Under amsgrad the
                # largest second moment divides, and it does not decay.
                unsafe, bound = False, N(terms[UNSAFE_UP_TO])
                if terms[UNSAFE_UP_TO] > 0:
                    for c in range(columns):
                        divisor = widen(u[c], N) if has_maximum else widen(v[c], N)
                        unsafe |= (divisor <= bound) & (widen(m[c], N) != zero)
                if not unsafe:
                    # All missed steps at once, with the sum expanded around the mean of e. The mean is never 0, and m
                    # is divided before anything else: where m is 0, nothing but weight decay moves p.
                    mean_n, m0 = N(max(terms[EBAR], normal)), N(terms[M0] * aged)
                    m2, m3 = N(terms[M2] * aged), N(terms[M3] * aged)
                    m4, m5 = N(terms[M4] * aged), N(terms[M5] * aged)
                    for c in range(columns):
                        m_c, v_c = widen(m[c], N), widen(v[c], N)
                        divisor = widen(u[c], N) if has_maximum else v_c
                        inverse = one / (math.sqrt(divisor) + mean_n)
                        theta_n = mean_n * inverse
                        total = m0 + theta_n * theta_n * (m2 - theta_n * (m3 - theta_n * (m4 - theta_n * m5)))
                        bits = state_bits(m_key, c)
                        store(p, c, kept_n * widen(p[c], N) - m_c * inverse * total, P, weights_bits(p_key, c))
                        m_c = m_c * beta1_power
                        store(m, c, zero if abs(m_c) < dust else m_c, M, bits)
                        store(v, c, v_c * beta2_power, V, second_bits(bits))
                else:
                    # The moves one by one. Here too e is never 0 and m is divided first.
                    for c in range(columns):
                        sums[c] = zero
                        roots[c] = math.sqrt(widen(u[c], N) if has_maximum else widen(v[c], N))
                    for j in range(1, count + 1):
                        slot = (start + j) % capacity
                        weight_n = N(
                            rate[slot] * kept_since(log_kept, now_coarse, now_fine, slot) * scalars[RATIO] ** j
                        )
                        e_n = N(max(scalars[EPS] * correction[slot] * scalars[GROWTH] ** j, normal))
                        for c in range(columns):
                            sums[c] += weight_n * (widen(m[c], N) / (roots[c] + e_n))
                    for c in range(columns):
                        bits = state_bits(m_key, c)
                        store(p, c, kept_n * widen(p[c], N) - sums[c], P, weights_bits(p_key, c))
                        m_c = widen(m[c], N) * beta1_power
                        store(m, c, zero if abs(m_c) < dust else m_c, M, bits)
                        store(v, c, widen(v[c], N) * beta2_power, V, second_bits(bits))
                if beta1_rest != one or beta2_rest != one:  # what the second factors leave of the moments
                    for c in range(columns):
                        m_c = widen(m[c], N) * beta1_rest
                        store(m, c, zero if abs(m_c) < dust else m_c, M, None)
                        store(v, c, widen(v[c], N) * beta2_rest, V, None)
            if is_by_row:
                v[0] = narrow(widen(v[0], N) * beta2_power * beta2_rest, V)
        return 1

    catch_up_part.__name__ = catch_up_part.__qualname__ = kind.name
    return OverThreads(kernel(types.int64, types.int64)(catch_up_part), N)


@njit(**INLINE)
def kept_since(log_kept, coarse, fine, slot):
    """What weight decay leaves of a weight since the step in this slot, up to one with these sums of logarithms."""
    return math.exp((coarse - log_kept[2 * slot]) * COARSE + (fine - log_kept[2 * slot + 1]) * FINE)


@kernel(*[types.int64] * 3)
def is_outside(ids_at, count, row_count):
    """Whether one of the ids is not in the table."""
    ids, outside = pointer(ids_at, types.int64), False
    for position in range(count):
        outside |= np.uint64(ids[position]) >= np.uint64(row_count)
    return outside

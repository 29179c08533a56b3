"""The coefficients of every gap after one more step. ``_schedule`` says what they are, in NumPy, which takes 91 µs."""

from __future__ import annotations

import math

from numba import types

from .._schedule import (
    CAPACITY,
    COLUMNS,
    DECAYED_AT,
    EBAR,
    EPS,
    FROZEN_AT,
    GROWTH,
    KEPT_AT,
    LACKING_AT,
    LARGEST,
    M0,
    M2,
    M3,
    M4,
    M5,
    RATE_AT,
    ROOT_AT,
    SAFE,
    SCALARS,
    SMALLEST,
)
from .cache import kernel
from .pointers import address_of, pointer


@kernel
def advance(
    sums, first, new_sums, new_first, table, powers, timeline, number, rate, root, kept, tolerance, has_tiny_means
):
    """Write the window after a step with this rate and this root, which leaves so much of a weight.

    The step is also written to the timeline, unless its number is 0.
    """
    words, scalars = pointer(address_of(timeline), types.int64), pointer(address_of(timeline), types.float64)
    growth, eps, length = scalars[SCALARS + GROWTH], scalars[SCALARS + EPS], new_first.size
    before, after = pointer(address_of(sums), types.float64), pointer(address_of(new_sums), types.float64)
    power, e1 = pointer(address_of(powers), types.float64), pointer(address_of(new_first), types.float64)
    e1_before, terms = pointer(address_of(first), types.float64), pointer(address_of(table), types.float64)
    for column in range(COLUMNS):
        terms[column] = 0.0
    weight = rate
    for n in range(7):
        row = n * length
        after[row] = power[row] * weight
        for k in range(1, length):
            after[row + k] = power[row + k] * weight + before[row + k - 1] * kept
        weight *= root
    e1[0] = root * growth
    for k in range(1, length):
        e1[k] = e1_before[k - 1]
    for k in range(length):
        total, mean = after[k], 1.0
        if total > 0:
            mean = after[length + k] / total
        inverse = 1 / mean
        s1, s2 = after[length + k] * inverse, after[2 * length + k] * inverse**2
        s3, s4 = after[3 * length + k] * inverse**3, after[4 * length + k] * inverse**4
        s5, s6 = after[5 * length + k] * inverse**5, after[6 * length + k] * inverse**6
        m2 = total - 2 * s1 + s2
        m3 = -total + 3 * s1 - 3 * s2 + s3
        m4 = total - 4 * s1 + 6 * s2 - 4 * s3 + s4
        m5 = -total + 5 * s1 - 10 * s2 + 10 * s3 - 5 * s4 + s5
        m6 = total - 6 * s1 + 15 * s2 - 20 * s3 + 15 * s4 - 6 * s5 + s6
        ebar, rest = eps * mean, 0.0
        if total > 0:
            rest = abs(m6) / total * max(1.0, mean / e1[k])
        safe = 0.0
        if not rest <= tolerance:  # a power takes 40 ns, and in a long run nearly every gap does without
            safe = (ebar * ((rest / tolerance) ** (1 / 6) - 1)) ** 2
        if has_tiny_means and ebar < 1 / LARGEST:
            safe += SMALLEST
        here = (k + 1) * COLUMNS
        if (
            total < LARGEST and ebar < LARGEST and safe < LARGEST and m6 == m6
            and abs(m2) < LARGEST and abs(m3) < LARGEST and abs(m4) < LARGEST and abs(m5) < LARGEST
        ):  # fmt: skip
            terms[here + M0], terms[here + EBAR], terms[here + M2], terms[here + M3] = total, ebar, m2, m3
            terms[here + M4], terms[here + M5], terms[here + SAFE] = m4, m5, safe
        else:
            for column in range(COLUMNS):
                terms[here + column] = 0.0
            terms[here + SAFE] = math.inf
    if number == 0:
        return
    capacity = words[CAPACITY]
    slot, before_slot, leaving = number % capacity, (number - 1) % capacity, (number - length) % capacity
    pointer(words[RATE_AT], types.float64)[slot] = rate
    pointer(words[ROOT_AT], types.float64)[slot] = root
    pointer(words[KEPT_AT], types.float64)[slot] = kept
    frozen = pointer(words[FROZEN_AT], types.float64)
    for column in range(COLUMNS):
        frozen[leaving * COLUMNS + column] = terms[length * COLUMNS + column]
    decayed, lacking = pointer(words[DECAYED_AT], types.float64), pointer(words[LACKING_AT], types.float64)
    addend = math.log(kept) - lacking[before_slot]
    total = decayed[before_slot] + addend
    lacking[slot] = (total - decayed[before_slot]) - addend
    decayed[slot] = total

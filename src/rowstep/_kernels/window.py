"""The coefficients of every gap after one more step. ``_schedule`` says what they are, in NumPy, which takes 91 µs."""

from __future__ import annotations

import math

from numba import types

from .._schedule import (
    CAPACITY,
    COEFFICIENTS,
    EBAR,
    EPS,
    FROZEN_AT,
    GROWTH,
    KEPT_AT,
    LARGEST,
    LOG_KEPT_AT,
    LOG_KEPT_ERROR_AT,
    RATE_AT,
    ROOT_AT,
    SCALARS,
    SMALLEST,
    UNSAFE_UP_TO,
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
    for column in range(COEFFICIENTS):
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
        here, total, mean, inverse = (k + 1) * COEFFICIENTS, after[k], 1.0, 1.0
        if total > 0:
            mean = after[length + k] / total
        # The sums in multiples of the mean; their n-th difference is Mn.
        for n in range(7):
            terms[here + n] = after[n * length + k] * inverse
            inverse /= mean
        for n in range(1, 7):
            for i in range(6, n - 1, -1):
                terms[here + i] -= terms[here + i - 1]
        rest, ebar, safe = 0.0, eps * mean, 0.0
        if total > 0:
            rest = abs(terms[here + 6]) / total * max(1.0, mean / e1[k])
        if not rest <= tolerance:  # a power takes 40 ns, and in a long run nearly every gap does without
            safe = (ebar * ((rest / tolerance) ** (1 / 6) - 1)) ** 2
        if has_tiny_means and ebar < 1 / LARGEST:
            safe += SMALLEST
        terms[here + EBAR], terms[here + UNSAFE_UP_TO] = ebar, safe
        is_good = True
        for column in range(COEFFICIENTS):
            is_good &= abs(terms[here + column]) < LARGEST
        if not is_good:
            for column in range(COEFFICIENTS):
                terms[here + column] = 0.0
            terms[here + UNSAFE_UP_TO] = math.inf
    if number == 0:
        return
    capacity = words[CAPACITY]
    slot, before_slot, leaving = number % capacity, (number - 1) % capacity, (number - length) % capacity
    pointer(words[RATE_AT], types.float64)[slot] = rate
    pointer(words[ROOT_AT], types.float64)[slot] = root
    pointer(words[KEPT_AT], types.float64)[slot] = kept
    frozen = pointer(words[FROZEN_AT], types.float64)
    for column in range(COEFFICIENTS):
        frozen[leaving * COEFFICIENTS + column] = terms[length * COEFFICIENTS + column]
    log_kept, log_kept_error = (
        pointer(words[LOG_KEPT_AT], types.float64),
        pointer(words[LOG_KEPT_ERROR_AT], types.float64),
    )
    addend = math.log(kept) - log_kept_error[before_slot]
    total = log_kept[before_slot] + addend
    log_kept_error[slot] = (total - log_kept[before_slot]) - addend
    log_kept[slot] = total

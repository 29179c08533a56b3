"""The coefficients of every gap after one more step. ``_schedule`` says what they are, in NumPy, which takes 91 µs."""

from __future__ import annotations  # noqa: I001  a timeline's words on a few lines

import math

import numpy as np
from numba import types

from .._schedule import (
    CAPACITY, COARSE, COEFFICIENTS, EBAR, EPS, FINE, FROZEN_AT, GROWTH, HAS_TINY_MEANS, KEPT, KEPT_AT, LARGEST,
    LENGTH, LOG_KEPT_AT, M0, M2, M3, M4, M5, POWERS_AT, RATE_AT, ROOT_AT, SCALARS, SMALLEST, TOLERANCE, UNSAFE_UP_TO,
)  # fmt: skip
from .cache import kernel
from .pointers import pointer

_I, _F64 = types.int64, types.float64


@kernel(_I, _I, _I, _I, _F64, _F64, _F64)
def advance(before_at, after_at, timeline_at, number, rate, root, kept):
    """Write the window after a step with this rate and this root, which leaves so much of a weight.

    The step is also written to the timeline, unless its number is 0.
    """
    words, scalars = pointer(timeline_at, _I), pointer(timeline_at + SCALARS * 8, _F64)
    length, eps, tolerance = words[LENGTH], scalars[EPS], scalars[TOLERANCE]
    power = pointer(words[POWERS_AT], _F64)
    before, e1_before = pointer(before_at, _F64), pointer(before_at + 7 * length * 8, _F64)
    after, e1 = pointer(after_at, _F64), pointer(after_at + 7 * length * 8, _F64)
    terms_before, terms = pointer(before_at + 8 * length * 8, _F64), pointer(after_at + 8 * length * 8, _F64)
    weight = rate
    for n in range(7):
        row = n * length
        after[row] = power[row] * weight
        for k in range(1, length):
            after[row + k] = power[row + k] * weight + before[row + k - 1] * kept
        weight *= root
    for k in range(length):
        e1[k] = e1_before[k - 1] if k > 0 else root * scalars[GROWTH]
        total, mean = after[k], 1.0
        if total > 0:
            mean = after[length + k] / total
        # The sums in multiples of the mean, of which the first is the total: Mn by the binomial theorem.
        inverse = 1 / mean
        square = inverse * inverse
        second, third = after[2 * length + k] * square, after[3 * length + k] * square * inverse
        square *= square
        fourth, fifth = after[4 * length + k] * square, after[5 * length + k] * square * inverse
        sixth = after[6 * length + k] * square * inverse * inverse
        sixth += 15 * (fourth + second) - 6 * fifth - 20 * third - 5 * total
        gap = pointer(after_at + (8 * length + (k + 1) * COEFFICIENTS) * 8, _F64)
        gap[M0], gap[EBAR], gap[M2] = total, eps * mean, second - total
        gap[M3] = third - 3 * second + 2 * total
        gap[M4] = fourth - 4 * third + 6 * second - 3 * total
        gap[M5] = fifth - 5 * fourth + 10 * (third - second) + 4 * total
        rest, safe = 0.0, 0.0
        if total > 0:
            rest = abs(sixth) / total * max(1.0, mean / e1[k])
        if not rest <= tolerance:  # a power takes 40 ns, and in a long run nearly every gap does without
            safe = (eps * mean * ((rest / tolerance) ** (1 / 6) - 1)) ** 2
        if scalars[HAS_TINY_MEANS] != 0 and eps * mean < 1 / LARGEST:
            safe += SMALLEST
        gap[UNSAFE_UP_TO] = safe
        is_good = abs(sixth) < LARGEST
        for column in range(KEPT):
            is_good &= abs(gap[column]) < LARGEST
        if not is_good:
            for column in range(KEPT):
                gap[column] = 0.0
            gap[UNSAFE_UP_TO] = math.inf
        gap[KEPT] = terms_before[k * COEFFICIENTS + KEPT] * kept
    for column in range(KEPT):
        terms[column] = 0.0
    terms[KEPT] = 1.0
    if number == 0:
        return 0
    capacity = words[CAPACITY]
    slot, before_slot, leaving = number % capacity, (number - 1) % capacity, (number - length) % capacity
    pointer(words[RATE_AT], _F64)[slot] = rate
    pointer(words[ROOT_AT], _F64)[slot] = root
    pointer(words[KEPT_AT], _F64)[slot] = kept
    frozen = pointer(words[FROZEN_AT], _F64)
    for column in range(COEFFICIENTS):
        frozen[leaving * COEFFICIENTS + column] = terms[length * COEFFICIENTS + column]
    log_kept, log = pointer(words[LOG_KEPT_AT], _I), math.log(kept)
    coarse = np.int64(math.floor(log / COARSE))
    log_kept[2 * slot] = log_kept[2 * before_slot] + coarse
    log_kept[2 * slot + 1] = log_kept[2 * before_slot + 1] + np.int64((log - coarse * COARSE) / FINE)
    return 0

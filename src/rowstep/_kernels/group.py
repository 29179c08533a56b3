"""Bring the occurrences of each row together: a stable radix sort, on only as many bits as the table needs.

An occurrence is one 64-bit key, ``row << shift | position``. Positions ascend from the start, so sorting by the row's
bits alone leaves equal rows in order of occurrence, and the key carries where its values are. 65,536 ids of a million
rows take 0.4 ms; ids that come sorted are not sorted again.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from .bits import INLINE, JIT, borrowed

# Two passes of 12 bits cover 16 million rows, and 4096 counters still sit in the L1 cache.
_DIGIT_BITS = 12


@njit(**JIT)
def first_outside(rows, row_count):
    """The position of the first row number that is not in the table, or -1."""
    # As an unsigned number a negative one is large: one comparison finds both kinds, and the loop vectorises.
    limit = np.uint64(row_count)
    outside = np.uint64(0)
    for row in rows:
        outside |= np.uint64(np.uint64(row) >= limit)
    if outside:
        for position in range(rows.size):
            if np.uint64(rows[position]) >= limit:
                return position
    return -1


@njit(**JIT)
def group(rows, shift, row_bits, keys, spare):
    """Fill ``keys`` with the occurrences in ascending order of row, then of position.

    Both arrays may be longer than needed; what ``spare`` holds is lost.
    """
    passes = max(1, (row_bits + _DIGIT_BITS - 1) // _DIGIT_BITS)
    width = (row_bits + passes - 1) // passes
    # Each pass moves everything to the other array: start in the one that makes `keys` the last.
    source, target = (borrowed(spare), borrowed(keys)) if passes % 2 else (borrowed(keys), borrowed(spare))
    ascending, previous = True, np.int64(0)
    for position in range(rows.size):
        row = rows[position]
        ascending &= row >= previous
        previous = row
        source[position] = (np.uint64(row) << np.uint64(shift)) | np.uint64(position)
    if ascending:
        if passes % 2:
            keys[: rows.size] = spare[: rows.size]
        return
    counts = np.empty(1 << width, np.int64)
    for digit in range(passes):
        _sort_by_digit(source, target, rows.size, np.uint64(shift + digit * width), counts)
        source, target = target, source


@njit(**INLINE)
def _sort_by_digit(source, target, count, shift, counts):
    mask = np.uint64(counts.size - 1)
    counts[:] = 0
    for position in range(count):
        counts[(source[position] >> shift) & mask] += 1
    total = 0
    for digit in range(counts.size):
        digit_count = counts[digit]
        counts[digit] = total
        total += digit_count
    for position in range(count):
        key = source[position]
        digit = (key >> shift) & mask
        target[counts[digit]] = key
        counts[digit] += 1


@njit(**JIT)
def next_row_start(keys, count, position, shift):
    """The first position at or after this one where a new row begins: where work can be cut."""
    while 0 < position < count and keys[position] >> shift == keys[position - 1] >> shift:
        position += 1
    return position

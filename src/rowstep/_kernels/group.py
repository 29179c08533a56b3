"""Bring the occurrences of each row together: a stable radix sort, on only as many bits as the table needs.

An occurrence is one 64-bit key, ``row << shift | position``. Positions ascend from the start, so sorting by the row's
bits alone leaves equal rows in order of occurrence, and the key carries where its values are. 65,536 ids of a million
rows take 0.4 ms; ids that come sorted are not sorted again.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from . import INNER
from .memory import address_of, int64s_at, int64s_on_the_stack

# Two passes of 12 bits cover 16 million rows, and 4096 counters still sit in the L1 cache.
_DIGIT_BITS = 12
_DIGITS = 1 << _DIGIT_BITS


@njit(**INNER)
def group(rows, low, high, shift, row_bits, keys, spare):
    """Fill ``keys`` with the occurrences of the rows low..high-1, ascending by row, then by position; return how many.

    Both arrays need room for one key more; what ``spare`` holds is lost.
    """
    passes = max(1, (row_bits + _DIGIT_BITS - 1) // _DIGIT_BITS)
    width = (row_bits + passes - 1) // passes
    # Each pass moves everything to the other array: start in the one that makes `keys` the last.
    source, target = (spare, keys) if passes % 2 else (keys, spare)
    ascending, previous, count = True, np.int64(0), np.int64(0)
    for position in range(rows.size):
        row = rows[position]
        source[count] = (np.uint64(row) << np.uint64(shift)) | np.uint64(position)
        # A branch here would be mispredicted every other time.
        mine = (row >= low) & (row < high)
        count += mine
        ascending &= (row >= previous) | (not mine)
        previous = row if mine else previous
    if ascending:
        if passes % 2:
            for position in range(count):  # a slice assignment would compile 2 s of error messages about shapes
                keys[position] = spare[position]
        return count
    counts_at = address_of(int64s_on_the_stack(_DIGITS))
    for digit in range(passes):
        _sort_by_digit(source, target, count, np.uint64(shift + digit * width), int64s_at(counts_at, 1 << width))
        source, target = target, source
    return count


@njit(**INNER)
def _sort_by_digit(source, target, count, shift, counts):
    mask = np.uint64(counts.size - 1)
    for digit in range(counts.size):
        counts[digit] = 0
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


@njit(**INNER)
def next_row_start(keys, count, position, shift):
    """The first position at or after this one, which is not the first of all, where a new row begins."""
    while position < count and keys[position] >> shift == keys[position - 1] >> shift:
        position += 1
    return position

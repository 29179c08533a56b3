"""Bring the occurrences of each row together: a stable radix sort, on only as many bits as the table needs.

An occurrence is one 64-bit key, ``row << shift | position``. Positions ascend from the start, so sorting by the row's
bits alone leaves equal rows in order of occurrence, and the key carries where its values are. 65,536 ids of a million
rows take 0.4 ms; ids that come sorted are not sorted again.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np import arrayobj

from .bits import INNER, ids_at
from .cache import kernel

# Two passes of 12 bits cover 16 million rows, and 4096 counters still sit in the L1 cache.
_DIGIT_BITS = 12

# Fine enough to balance a few dozen threads; a row is never cut.
_SPLIT_BITS = 10


@kernel
def first_outside(rows_at, count, row_count):
    """The position of the first row number that is not in the table, or -1."""
    rows = ids_at(rows_at, count)
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


@njit(**INNER)
def split(rows, row_bits, parts, bounds):
    """Share the table among ``parts``, by rows, so that each has about the same number of occurrences.

    Part i has the rows from ``bounds[0, i]`` up to ``bounds[0, i + 1]``, and room for their keys from ``bounds[1, i]``.
    """
    shift = np.uint64(max(0, row_bits - _SPLIT_BITS))
    counts = np.zeros(1 << min(row_bits, _SPLIT_BITS), np.int64)
    for row in rows:
        counts[np.uint64(row) >> shift] += 1
    part = seen = 0
    bounds[0, 0] = bounds[1, 0] = 0
    for digit in range(counts.size):
        while part + 1 < parts and seen * parts >= rows.size * (part + 1):
            part += 1
            bounds[0, part] = np.int64(np.uint64(digit) << shift)
            bounds[1, part] = seen + part  # `group` may write one key behind its own
        seen += counts[digit]
    for rest in range(part + 1, parts + 1):
        bounds[0, rest] = np.int64(np.uint64(counts.size) << shift)
        bounds[1, rest] = seen + rest


@intrinsic
def _counters(typing_context):
    """A counter for each digit, on the stack: 32 KB.

    A part of the work must not run out of memory. On a thread of the pool nobody would hear of it, and the other parts
    would have been updated.
    """
    result = types.Array(types.int64, 1, "C")

    def codegen(context, builder, signature, arguments):
        counters = context.make_array(result)(context, builder)
        memory = cgutils.alloca_once(builder, ir.ArrayType(ir.IntType(64), 1 << _DIGIT_BITS))
        pointer = builder.bitcast(memory, counters.data.type)
        size, item = (context.get_constant(types.intp, number) for number in (1 << _DIGIT_BITS, 8))
        arrayobj.populate_array(counters, pointer, [size], [item], item, None)
        return counters._getvalue()

    return result(), codegen


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
    counts = _counters()
    for digit in range(passes):
        _sort_by_digit(source, target, count, np.uint64(shift + digit * width), counts[: 1 << width])
        source, target = target, source
    return count


@njit(**INNER)
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


@njit(**INNER)
def next_row_start(keys, count, position, shift):
    """The first position at or after this one where a new row begins: where work can be cut."""
    while 0 < position < count and keys[position] >> shift == keys[position - 1] >> shift:
        position += 1
    return position

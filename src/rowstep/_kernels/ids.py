"""What is done with the row numbers of a gradient before a row moves: they are checked, and grouped by row."""

from __future__ import annotations

import numpy as np
from numba import njit, types

from . import INNER
from .cache import kernel
from .job import COUNT, JOB_BYTES, JOB_WORDS, NOTE, NOTES_AT, POSITION_BITS, ROW_BITS, ROW_COUNT, ROWS_AT
from .pointers import address_of, pointer, room

# Two passes of 12 bits cover 16 million rows, and 4096 counters still sit in the L1 cache.
DIGIT_BITS = 12
DIGITS = 1 << DIGIT_BITS


@kernel
def first_flawed(jobs):
    """The first job that names a row outside its table or, where rows have notes, one that has not reached the step
    before; -1 if there is none.
    """
    for number in range(jobs.size // JOB_WORDS):
        job = pointer(address_of(jobs) + number * JOB_BYTES, types.int64)
        rows, limit, flawed = pointer(job[ROWS_AT], types.int64), np.uint64(job[ROW_COUNT]), np.uint64(0)
        for position in range(job[COUNT]):
            # As an unsigned number a negative one is large: one comparison finds both kinds, and the loop vectorises.
            flawed |= np.uint64(np.uint64(rows[position]) >= limit)
        if job[NOTES_AT] != 0 and not flawed:
            notes = pointer(job[NOTES_AT], types.int32)
            for position in range(job[COUNT]):
                flawed |= np.uint64(notes[rows[position]] + 1 < job[NOTE])
        if flawed:
            return number
    return -1


@njit(**INNER)
def group(job, low, high, keys_at, spare_at):
    """Sort the rows low..high-1 of a job, stably; return how many there are, and where their keys lie.

    A key is row << POSITION_BITS | position. It is a radix sort on only as many bits as the table needs. Room for one
    key more is needed than there are.
    """
    rows, count = pointer(job[ROWS_AT], types.int64), job[COUNT]
    shift, row_bits = np.uint64(job[POSITION_BITS]), job[ROW_BITS]
    keys, end = pointer(keys_at, types.uint64), np.int64(0)
    ascending, previous = True, np.int64(0)
    for position in range(count):
        row = rows[position]
        keys[end] = (np.uint64(row) << shift) | np.uint64(position)
        # A branch here would be mispredicted every other time.
        mine = (row >= low) & (row < high)
        end += mine
        ascending &= (row >= previous) | (not mine)
        previous = row if mine else previous
    if ascending:
        return end, keys_at
    passes = (row_bits + DIGIT_BITS - 1) // DIGIT_BITS
    width = (row_bits + passes - 1) // passes
    counts, mask = room(DIGITS), np.uint64((1 << width) - 1)
    for digit in range(passes):
        source, target = pointer(keys_at, types.uint64), pointer(spare_at, types.uint64)
        digit_shift = shift + np.uint64(digit * width)
        for value in range(1 << width):
            counts[value] = 0
        for position in range(end):
            counts[(source[position] >> digit_shift) & mask] += 1
        running = np.int64(0)
        for value in range(1 << width):
            of_value = counts[value]
            counts[value] = running
            running += of_value
        for position in range(end):
            key = source[position]
            value = (key >> digit_shift) & mask
            target[counts[value]] = key
            counts[value] += 1
        keys_at, spare_at = spare_at, keys_at
    return end, keys_at

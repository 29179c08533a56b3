"""What is done with the row numbers of a gradient before a row moves: they are checked, and grouped by row."""

from __future__ import annotations

from numba import types

from .cache import kernel
from .job import COUNT, JOB_BYTES, NOTE, NOTES_AT, POSITION_BITS, ROW_BITS, ROW_COUNT, ROWS_AT
from .pointers import pointer, room

# Two passes of 12 bits cover 16 million rows, and 4096 counters still sit in the L1 cache.
DIGIT_BITS = 12
DIGITS = 1 << DIGIT_BITS

_I = types.int64


@kernel(_I, _I)
def first_flawed(jobs_at, job_count):
    """The first job that names a row outside its table or, where rows have notes, one that has not reached the step
    before; -1 if there is none.
    """
    for number in range(job_count):
        job = pointer(jobs_at + number * JOB_BYTES, _I)
        # As an unsigned number a negative one is large: one comparison finds both kinds, and the loop vectorises.
        rows, limit, is_flawed = pointer(job[ROWS_AT], types.uint64), types.uint64(job[ROW_COUNT]), False
        for position in range(job[COUNT]):
            is_flawed |= rows[position] >= limit
        if job[NOTES_AT] != 0 and not is_flawed:
            notes = pointer(job[NOTES_AT], types.int32)
            for position in range(job[COUNT]):
                is_flawed |= notes[rows[position]] + 1 < job[NOTE]
        if is_flawed:
            return number
    return -1


@kernel(_I, _I, _I, _I, _I)
def group(job_at, low, high, keys_at, spare_at):
    """Sort the rows low..high-1 of a job, stably; return how many there are, or, if their keys lie in spare, ``~many``.

    A key is row << POSITION_BITS | position. It is a radix sort on only as many bits as the table needs. Room for one
    key more is needed than there are.

    Other kernels call it by its address. As a part of each, it took a quarter of their time to compile.
    """
    job = pointer(job_at, _I)
    rows, count, shift, row_bits = pointer(job[ROWS_AT], _I), job[COUNT], job[POSITION_BITS], job[ROW_BITS]
    keys, end = pointer(keys_at, _I), 0
    is_ascending, previous = True, 0
    for position in range(count):
        row = rows[position]
        keys[end] = (row << shift) | position
        # A branch here would be mispredicted every other time.
        is_mine = (row >= low) & (row < high)
        end += is_mine
        is_ascending &= (row >= previous) | (not is_mine)
        previous = row if is_mine else previous
    if is_ascending:
        return end
    passes = (row_bits + DIGIT_BITS - 1) // DIGIT_BITS
    width = (row_bits + passes - 1) // passes
    counts, mask = room(DIGITS), (1 << width) - 1
    for digit in range(passes):
        source, target = pointer(keys_at, _I), pointer(spare_at, _I)
        digit_shift = shift + digit * width
        for value in range(mask + 1):
            counts[value] = 0
        for position in range(end):
            counts[(source[position] >> digit_shift) & mask] += 1
        running = 0
        for value in range(mask + 1):
            of_value = counts[value]
            counts[value] = running
            running += of_value
        for position in range(end):
            key = source[position]
            value = (key >> digit_shift) & mask
            target[counts[value]] = key
            counts[value] += 1
        keys_at, spare_at = spare_at, keys_at
    return ~end if passes & 1 else end


@kernel(*[_I] * 5)
def places_among(rows_at, count, distinct_at, distinct_count, places_at):
    """For each row its place among distinct ones, which ascend; -1 if it is not there.

    It walks along both. For 65,536 ascending rows that takes 0.2 ms, torch.searchsorted takes 3.4; and another batch
    waits for it.
    """
    rows, distinct, places = pointer(rows_at, _I), pointer(distinct_at, _I), pointer(places_at, _I)
    place, previous = 0, 0
    for position in range(count):
        row = rows[position]
        if row < previous:  # sums of gradients are not in order: begin again
            low, high = 0, place
            while low < high:
                middle = (low + high) >> 1
                if distinct[middle] < row:
                    low = middle + 1
                else:
                    high = middle
            place = low
        while place < distinct_count and distinct[place] < row:
            place += 1
        places[position] = place if place < distinct_count and distinct[place] == row else -1
        previous = row
    return 0

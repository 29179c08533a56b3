"""The walk over the rows that a gradient names: duplicates summed, memory asked for ahead, work shared by threads.

It knows no rule. It is handed a compiled function and folds it over the rows, ascending:

    result = visit(row, g, table, result)          g is the row's summed gradient, table whatever the function needs
    look_ahead(row, table)                         asks for the memory that a later visit will touch

The duplicates of a row are summed in order of occurrence, in a buffer that stays in the cache. Threads share a launch
by rows: the gradients of a launch are laid end to end and cut into pieces that take equally long, and where a cut falls
into a table, it falls between two rows. No row is shared, so the result has the same bits for any number of threads.

A launch takes *jobs*, records of ``JOB_WORDS`` 64-bit words in memory. The first eight say where a gradient is; the
others belong to whoever visits. All tables of a group that have the same dtypes are one launch.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from . import INLINE, INNER
from .cache import kernel
from .floats import widen
from .group import group, next_row_start
from .memory import CACHE_LINE, address_of, has_type_of, int64s_at, int64s_on_the_stack, prefetch, row_at, uint64s_at

# The words of a job: row numbers, how many, rows of the table, values, bytes from one row of values to the next, width,
# and how many bits it takes to number the occurrences and the rows.
ROWS_AT, COUNT, ROW_COUNT, G_AT, G_STRIDE, COLUMNS, POSITION_BITS, ROW_BITS = range(8)
JOB_WORDS = 22

# A piece of work: a job, the rows low..high-1 of its table, and where in the keys it may group them.
JOB, LOW, HIGH, KEYS_FROM = range(4)
PIECE_WORDS = 4

# How many cache lines to have under way of the gradient. At 64 columns that is 4 rows ahead, at 32 columns 8: the best
# of 2, 4, 8 and 16 in each case (10M x 32: 2.2 ms at 2 rows ahead, 1.1 ms at 8).
_G_LINES_AHEAD = 64

# Fine enough to balance a few dozen threads; a row is never cut.
_SHARE_BITS = 10
_SHARES = 1 << _SHARE_BITS

# What a row takes, beside an occurrence of it: its weights and moments are read and written, a gradient is only read
# (0.18 against 0.03 µs at 1M x 64). Vocabularies that are sorted by frequency have half of the occurrences in a few
# rows: cut by occurrences alone, a second thread made 65,536 of their ids 1.2x faster, cut by both 1.6x.
_ROW_COST = 6


def room_for_pieces(jobs: int, parts: int) -> int:
    """How many words `share` may write: those in front, and a piece for each job and each part."""
    return parts + 2 + (jobs + parts) * PIECE_WORDS


@njit(**INLINE)
def piece_of(number, jobs, pieces):
    """The job of a piece of work, its rows, and where its keys may be. Without pieces, each is a whole job."""
    if pieces.size == 0:
        job = int64s_at(address_of(jobs) + number * (JOB_WORDS * 8), JOB_WORDS)
        return job, np.int64(0), job[ROW_COUNT], np.int64(0)
    # In front of the pieces are the number of parts, and each part's first piece, and the end.
    piece = int64s_at(address_of(pieces) + (pieces[0] + 2 + number * PIECE_WORDS) * 8, PIECE_WORDS)
    job = int64s_at(address_of(jobs) + piece[JOB] * (JOB_WORDS * 8), JOB_WORDS)
    return job, piece[LOW], piece[HIGH], piece[KEYS_FROM]


@njit(**INLINE)
def over_gradient(
    job, low, high, keys_from, keys_at, spare_at, total_at, like, g_like, rows_ahead, look_ahead, visit, table, result
):
    """Fold ``visit`` over the rows low..high-1 that a job's gradient names."""
    count, columns = job[COUNT], job[COLUMNS]
    shift = np.uint64(job[POSITION_BITS])
    keys, spare = uint64s_at(keys_at + keys_from * 8, count + 1), uint64s_at(spare_at + keys_from * 8, count + 1)
    last = group(int64s_at(job[ROWS_AT], count), low, high, shift, job[ROW_BITS], keys, spare)
    total = row_at(total_at, columns, like)
    g_bytes = columns * g_like.itemsize
    gradient = (job[G_AT], job[G_STRIDE], g_bytes, _G_LINES_AHEAD // (g_bytes // CACHE_LINE + 1) + 1)
    here = np.int64(0)  # a bare 0 has a type of its own, and all that is called with it would be compiled twice
    while here < last:
        row = np.int64(keys[here] >> shift)
        end = next_row_start(keys, last, here + 1, shift)
        g = summed(keys, here, end, last, shift, gradient, g_like, total, rows_ahead, look_ahead, table)
        result = visit(row, g, table, result)
        here = end
    return result


@njit(**INLINE)
def summed(keys, first, end, last, shift, gradient, g_like, total, rows_ahead, look_ahead, table):
    """The gradient of one row: its only occurrence where it lies, or the sum of all of them, in order, in ``total``.

    On the way, ask for the memory that the occurrences after this one will need. Every occurrence's gradient is asked
    for, not only the first of a row: under Zipf ids most of the time goes into gradient rows that lie in random order.
    """
    g_at, g_stride, g_bytes, g_ahead = gradient
    mask = (np.uint64(1) << shift) - np.uint64(1)
    for here in range(first, end):
        there = here + g_ahead
        if there < last:
            prefetch(g_at + np.int64(keys[there] & mask) * g_stride, g_bytes)
        there = here + rows_ahead
        if there < last and keys[there] >> shift != keys[there - 1] >> shift:
            look_ahead(np.int64(keys[there] >> shift), table)
        g_at_here = g_at + np.int64(keys[here] & mask) * g_stride
        if end == first + 1 and has_type_of(g_like, total):
            return row_at(g_at_here, total.size, total)
        g = row_at(g_at_here, total.size, g_like)
        if here == first:
            for c in range(total.size):
                total[c] = widen(g[c], total)
        else:
            for c in range(total.size):
                total[c] += widen(g[c], total)
    return total


@njit(**INLINE)
def ask_for_nothing(row, table):
    """For visits that touch no memory but the gradient."""


@kernel
def first_outside(rows_at, count, row_count):
    """The position of the first row number that is not in the table, or -1."""
    # As an unsigned number a negative one is large: one comparison finds both kinds, and the loop vectorises.
    rows, limit = int64s_at(rows_at, count), np.uint64(row_count)
    found = np.uint64(0)
    for row in rows:
        found |= np.uint64(np.uint64(row) >= limit)
    if found:
        for position in range(rows.size):
            if np.uint64(rows[position]) >= limit:
                return position
    return -1


@kernel
def share(jobs, parts, pieces):
    """Cut the work of all jobs into equal parts, and write the pieces; return how many keys there must be room for.

    ``pieces`` has as much room as ``room_for_pieces`` says.
    """
    job_count = jobs.size // JOB_WORDS
    counts = int64s_on_the_stack(_SHARES)
    total = np.int64(0)
    for number in range(job_count):
        total += work_of(int64s_at(address_of(jobs) + number * (JOB_WORDS * 8), JOB_WORDS))
    pieces[0], pieces[1] = parts, 0
    written = part = seen = np.int64(0)
    keys_from = needed = np.int64(0)  # of this part: where its keys begin, and the most that a piece of it needs
    for number in range(job_count):
        job = int64s_at(address_of(jobs) + number * (JOB_WORDS * 8), JOB_WORDS)
        low = counted = np.int64(0)
        work = work_of(job)
        if is_cut(part, parts, total, seen + work):
            shift = np.uint64(max(0, job[ROW_BITS] - _SHARE_BITS))
            count_upper_bits(int64s_at(job[ROWS_AT], job[COUNT]), shift, counts)
            cost = np.int64(0)
            for digit in range(counts.size):
                cost += cost_of(counts[digit], shift)
            digit = occurrences = spent = np.int64(0)
            while is_cut(part, parts, total, seen + work):
                wanted = (total * ((part + 1) / parts) - seen) / work * cost
                while spent < wanted and digit < counts.size:
                    spent += cost_of(counts[digit], shift)
                    occurrences += counts[digit]
                    digit += 1
                high = min(np.int64(np.uint64(digit) << shift), job[ROW_COUNT])
                write_piece(pieces, written, number, low, high, keys_from)
                keys_from += max(needed, occurrences - counted) + 1  # `group` may write one key behind its own
                needed, counted, low = np.int64(0), occurrences, high
                written += 1
                part += 1
                pieces[1 + part] = written
        write_piece(pieces, written, number, low, job[ROW_COUNT], keys_from)
        written += 1
        needed = max(needed, job[COUNT] - counted)
        seen += work
    for rest in range(part + 1, parts + 1):
        pieces[1 + rest] = written
    return keys_from + needed + 1


@njit(**INNER)
def is_cut(part, parts, total, reached):
    """Whether the end of this part, which is not the last, comes before this much work is reached."""
    return part + 1 < parts and total * ((part + 1) / parts) < reached


@njit(**INNER)
def count_upper_bits(rows, shift, counts):
    """How many of the row numbers have each of the upper bits that this shift leaves."""
    for bits in range(counts.size):
        counts[bits] = 0
    for row in rows:
        counts[np.uint64(row) >> shift] += 1


@njit(**INNER)
def cost_of(occurrences, shift):
    """About how long so many occurrences take among the rows that share their upper bits, in occurrences.

    How many of these rows occur is not known before they are sorted: no more than there are, nor than occurrences.
    """
    return occurrences + _ROW_COST * min(occurrences, np.int64(1) << np.int64(shift))


@njit(**INNER)
def work_of(job):
    """About how long a job takes: its numbers, and what each occurrence costs besides."""
    return job[COUNT] * (job[COLUMNS] + 16)


@njit(**INNER)
def write_piece(pieces, number, job, low, high, keys_from):
    piece = int64s_at(address_of(pieces) + (pieces[0] + 2 + number * PIECE_WORDS) * 8, PIECE_WORDS)
    piece[JOB], piece[LOW], piece[HIGH], piece[KEYS_FROM] = job, low, high, keys_from

"""Cut a launch into parts that take equally long, one for each thread. No row of a table is in two of them."""

from __future__ import annotations

import numpy as np
from numba import njit, types

from . import INNER
from .cache import kernel
from .job import COLUMNS, COUNT, HIGH, JOB, JOB_BYTES, KEYS_FROM, LOW, PIECE_BYTES, ROW_BITS, ROW_COUNT, ROWS_AT
from .pointers import pointer, room

# Fine enough to balance a few dozen threads; a row is never cut, nor what shares its upper bits.
SHARE_BITS = 10
_SHARES = 1 << SHARE_BITS

# What a row takes, beside an occurrence of it: its weights and moments are read and written, a gradient is only read
# (0.18 against 0.03 µs at 1M x 64). Vocabularies that are sorted by frequency have half of the occurrences in a few
# rows: cut by occurrences alone, a second thread made 65,536 of their ids 1.2x faster, cut by both 1.6x.
_ROW_COST = 6


def room_for_pieces(jobs: int, parts: int) -> int:
    """How many words `share` may write: those in front, and a piece for each job and each part."""
    return parts + 2 + (jobs + parts) * PIECE_BYTES // 8


@kernel(*[types.int64] * 4)
def share(jobs_at, job_count, parts, pieces_at):
    """Write the pieces of each part; return how many keys there must be room for.

    In front of the pieces are the number of parts, each part's first piece, and the end.
    """
    counts, heads = room(_SHARES), pointer(pieces_at, types.int64)
    total = np.int64(0)
    for number in range(job_count):
        total += work_of(pointer(jobs_at + number * JOB_BYTES, types.int64))
    heads[0], heads[1] = parts, 0
    written = part = seen = np.int64(0)
    keys_from = needed = np.int64(0)  # of this part: where its keys begin, and the most that a piece of it needs
    for number in range(job_count):
        job = pointer(jobs_at + number * JOB_BYTES, types.int64)
        low = counted = np.int64(0)
        work = work_of(job)
        if is_cut(part, parts, total, seen + work):
            shift = np.uint64(max(0, job[ROW_BITS] - SHARE_BITS))
            rows = pointer(job[ROWS_AT], types.int64)
            for bits in range(_SHARES):
                counts[bits] = 0
            for position in range(job[COUNT]):
                counts[np.uint64(rows[position]) >> shift] += 1
            cost = np.int64(0)
            for digit in range(_SHARES):
                cost += cost_of(counts[digit], shift)
            digit = occurrences = spent = np.int64(0)
            while is_cut(part, parts, total, seen + work):
                wanted = (total * ((part + 1) / parts) - seen) / work * cost
                while spent < wanted and digit < _SHARES:
                    spent += cost_of(counts[digit], shift)
                    occurrences += counts[digit]
                    digit += 1
                high = min(np.int64(np.uint64(digit) << shift), job[ROW_COUNT])
                write_piece(pieces_at, parts, written, number, low, high, keys_from)
                keys_from += max(needed, occurrences - counted) + 1  # grouping may write one key behind its own
                needed, counted, low = np.int64(0), occurrences, high
                written += 1
                part += 1
                heads[1 + part] = written
        write_piece(pieces_at, parts, written, number, low, job[ROW_COUNT], keys_from)
        written += 1
        needed = max(needed, job[COUNT] - counted)
        seen += work
    for rest in range(part + 1, parts + 1):
        heads[1 + rest] = written
    return keys_from + needed + 1


@njit(**INNER)
def is_cut(part, parts, total, reached):
    """Whether the end of this part, which is not the last, comes before this much work is reached."""
    return part + 1 < parts and total * ((part + 1) / parts) < reached


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
def write_piece(pieces_at, parts, number, job, low, high, keys_from):
    piece = pointer(pieces_at + (parts + 2) * 8 + number * PIECE_BYTES, types.int64)
    piece[JOB], piece[LOW], piece[HIGH], piece[KEYS_FROM] = job, low, high, keys_from

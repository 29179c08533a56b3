"""The walk over the rows that gradients name, and what is done with each: one flat function, made for each kind.

    group                     a stable radix sort of the ids, on only as many bits as the table needs
    sum                       the occurrences of a row, in order of occurrence, in a buffer that stays in the cache
    step                      the rule, with p, m and v of the row read and written once

It is flat because nesting costs: twenty compiled functions took 1.6 times as long to compile, and four times as long
for a small table (both on a busy machine). A *kind* says which types and options a kernel is made for. What is off in
it is None, a constant of the kernel, and leaves no code.

A launch takes *jobs*, records of ``JOB_WORDS`` 64-bit words that say where a gradient, its table and its state are.
Threads share a launch by rows (``share``): work is cut between two rows. No row is in two pieces, so the result has the
same bits for any number of threads.

Names: ``p``, ``m``, ``v`` and ``u`` are the parameter, the moments and amsgrad's maximum, ``g`` the gradient. ``x_at``
is the address where x begins.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np
from numba import njit, types

from .._rules import adam
from . import INLINE
from .cache import kernel
from .floats import load, narrow, store, widen
from .pointers import CACHE_LINE, address_of, only_if, pointer, prefetch, room
from .pool import OverThreads
from .rounding import first_bits, second_bits, state_key, weights_key
from .vectors import sum_of_squares

# The words of a job. Of the gradient: where it is, and the note that its rows get. Of the table: what it is like, and
# where it and its state are. Of the step: the key of random rounding, and scalars.
ROWS_AT, COUNT, G_AT, G_STRIDE, POSITION_BITS, NOTE = range(6)
ROW_COUNT, COLUMNS, ROW_BITS, P_AT, M_AT, V_AT, U_AT, COUNTS_AT, NOTES_AT = range(6, 15)
KEY = 15
BETA1, BETA2, EPS, STEP_SIZE, SHRINK, DECAY = range(16, 22)
JOB_WORDS = 22
JOB_BYTES = JOB_WORDS * 8

# A piece of work: a job, the rows low..high-1 of its table, and where in the keys it may group them.
JOB, LOW, HIGH, KEYS_FROM = range(4)
PIECE_BYTES = 32

# Two passes of 12 bits cover 16 million rows, and 4096 counters still sit in the L1 cache.
DIGIT_BITS = 12
DIGITS = 1 << DIGIT_BITS

# How many cache lines to have under way of the gradient and of the tables. Of the gradient that is 4 rows ahead at 64
# columns and 8 at 32: the best of 2, 4, 8 and 16 in each case (10M x 32: 2.2 ms at 2 rows ahead, 1.1 ms at 8).
G_LINES_AHEAD = 64
TABLE_LINES_AHEAD = 48

rule = njit(**INLINE)(adam.update)
averaged = njit(**INLINE)(adam.averaged)


class Kind(NamedTuple):
    """What a kernel is made for."""

    p: Any
    m: Any
    v: Any
    g: Any
    number: Any
    """The types of what is stored, and of what is computed with."""
    work: str = "step"
    """``step``, ``norm`` or ``nonfinite``: what is done with the summed gradient of a row."""
    momentum: Any = True
    by_row: Any = None
    amsgrad: Any = None
    counted: Any = None
    noted: Any = None
    maximize: Any = None
    shrink: Any = None
    decay: Any = None
    as_dense: Any = None
    skip_nonfinite: Any = None
    rounds_state: Any = None
    rounds_weights: Any = None

    @property
    def name(self) -> str:
        """For the file that the kernel is kept in."""
        options = [name for name, on in zip(self._fields[6:], self[6:], strict=True) if on is not None]
        return "-".join([self.work, *map(str, self[:5]), *options])


@njit(**INLINE)
def maximum(u, v):
    """The larger one; a NaN on either side stays one, as torch.maximum has it."""
    return u if u > v or u != u else v


@functools.cache
def over_rows(kind: Kind) -> OverThreads:
    """The kernel of a kind, to be called for all parts of a launch."""
    P, M, V, G, N, work = kind[:6]  # noqa: N806
    (
        momentum, by_row, amsgrad, counted, noted, maximize, shrink, decay, as_dense, skip_nonfinite,
        rounds_state, rounds_weights,
    ) = kind[6:]  # fmt: skip
    is_step, is_norm = work == "step", work == "norm"
    p_size, m_size, v_size, g_size, n_size = (each.bitwidth // 8 for each in kind[:5])
    in_place = G == N  # a single occurrence is used where it lies
    is_by_row, has_momentum = by_row is not None, momentum is not None
    is_counted, is_noted, has_decay = counted is not None, noted is not None, decay is not None
    skips, corrects_eps, turns = skip_nonfinite is not None, as_dense is not None, maximize is not None
    by_element = None if is_by_row else True
    inner_decay = None if is_by_row else decay

    def over_rows_part(part, results, jobs, pieces, keys_at, spare_at, totals, power):
        jobs_at, pieces_at = address_of(jobs), address_of(pieces)
        total_at = address_of(totals) + part * totals.shape[1] * n_size
        total = pointer(total_at, N)
        counts = room(DIGITS)
        result = 0.0
        first, last = np.int64(0), jobs.size // JOB_WORDS
        heads, is_shared = pointer(pieces_at, types.int64), pieces.size > 0
        if is_shared:
            first, last = heads[1 + part], heads[2 + part]
        for number in range(first, last):
            low = keys_from = np.int64(0)
            job_at = jobs_at + number * JOB_BYTES
            if is_shared:
                piece = pointer(pieces_at + (heads[0] + 2) * 8 + number * PIECE_BYTES, types.int64)
                job_at = jobs_at + piece[JOB] * JOB_BYTES
            job, scalars = pointer(job_at, types.int64), pointer(job_at, types.float64)
            high = job[ROW_COUNT]
            if is_shared:
                low, high, keys_from = piece[LOW], piece[HIGH], piece[KEYS_FROM]
            rows, count, columns = pointer(job[ROWS_AT], types.int64), job[COUNT], job[COLUMNS]
            shift, row_bits = np.uint64(job[POSITION_BITS]), job[ROW_BITS]

            # Group. A key is row << shift | position, and sorting is stable, so occurrences of a row stay in order.
            passes = max(np.int64(1), (row_bits + DIGIT_BITS - 1) // DIGIT_BITS)
            width = (row_bits + passes - 1) // passes
            source_at, target_at = keys_at + keys_from * 8, spare_at + keys_from * 8
            source = pointer(source_at, types.uint64)
            ascending, previous, end = True, np.int64(0), np.int64(0)
            for position in range(count):
                row = rows[position]
                source[end] = (np.uint64(row) << shift) | np.uint64(position)
                # A branch here would be mispredicted every other time.
                mine = (row >= low) & (row < high)
                end += mine
                ascending &= (row >= previous) | (not mine)
                previous = row if mine else previous
            if not ascending:
                for digit in range(passes):
                    source, target = pointer(source_at, types.uint64), pointer(target_at, types.uint64)
                    digit_shift, digit_mask = shift + np.uint64(digit * width), np.uint64((1 << width) - 1)
                    for value in range(1 << width):
                        counts[value] = 0
                    for position in range(end):
                        counts[(source[position] >> digit_shift) & digit_mask] += 1
                    running = np.int64(0)
                    for value in range(1 << width):
                        of_value = counts[value]
                        counts[value] = running
                        running += of_value
                    for position in range(end):
                        key = source[position]
                        value = (key >> digit_shift) & digit_mask
                        target[counts[value]] = key
                        counts[value] += 1
                    source_at, target_at = target_at, source_at
            keys = pointer(source_at, types.uint64)

            g_at, g_stride, g_bytes = job[G_AT], job[G_STRIDE], columns * g_size
            p_at, m_at, v_at = job[P_AT], job[M_AT], job[V_AT]
            p_bytes, m_bytes, v_bytes = columns * p_size, columns * m_size, (1 if is_by_row else columns) * v_size
            row_bytes = p_bytes + v_bytes + (m_bytes if has_momentum else 0)
            g_ahead = G_LINES_AHEAD // (g_bytes // CACHE_LINE + 1) + 1
            rows_ahead = TABLE_LINES_AHEAD // (row_bytes // CACHE_LINE + 1) + 1
            position_mask = (np.uint64(1) << shift) - np.uint64(1)
            here = np.int64(0)
            while here < end:
                # Sum the occurrences of a row, and ask for the memory that those after them will need. Every
                # occurrence's gradient is asked for, not only the first of a row: under Zipf ids most of the time goes
                # into gradient rows that lie in random order.
                row = np.int64(keys[here] >> shift)
                begin = here
                g_here = g_at + np.int64(keys[here] & position_mask) * g_stride
                while here < end and np.int64(keys[here] >> shift) == row:
                    there = here + g_ahead
                    if there < end:
                        prefetch(g_at + np.int64(keys[there] & position_mask) * g_stride, g_bytes)
                    there = here + rows_ahead
                    if is_step and there < end and keys[there] >> shift != keys[there - 1] >> shift:
                        ahead = np.int64(keys[there] >> shift)
                        prefetch(p_at + ahead * p_bytes, p_bytes)
                        if has_momentum:
                            prefetch(m_at + ahead * m_bytes, m_bytes)
                        prefetch(v_at + ahead * v_bytes, v_bytes)
                    if here > begin:
                        if here == begin + 1:
                            first_g = pointer(g_here, G)
                            for c in range(columns):
                                total[c] = widen(first_g[c], N)
                        more = pointer(g_at + np.int64(keys[here] & position_mask) * g_stride, G)
                        for c in range(columns):
                            total[c] += widen(more[c], N)
                    here += 1
                g_row_at = total_at
                if in_place and here == begin + 1:
                    g_row_at = g_here
                elif here == begin + 1:
                    first_g = pointer(g_here, G)
                    for c in range(columns):
                        total[c] = widen(first_g[c], N)
                g = pointer(g_row_at, N)

                if is_norm:
                    if power == 2.0:
                        result += sum_of_squares(g_row_at, columns, N)
                    elif power == math.inf:
                        for c in range(columns):  # written so that a NaN, once seen, stays
                            size = np.float64(abs(g[c]))
                            result = result if result >= size or result != result else size
                    else:
                        for c in range(columns):
                            result += np.float64(abs(g[c])) ** power if g[c] != 0 else 0.0
                    continue
                if skips or not is_step:
                    is_finite = True
                    for c in range(columns):
                        is_finite &= math.isfinite(g[c])
                    if not is_finite:
                        result += 1
                    if not is_finite or not is_step:
                        continue

                # Step the row, unless a signal's handler has brought it past this step.
                notes = pointer(job[NOTES_AT], types.int32)
                if is_noted and notes[row] >= job[NOTE]:
                    continue
                step_size, eps = scalars[STEP_SIZE], scalars[EPS]
                if is_counted:
                    row_counts = pointer(job[COUNTS_AT], types.int64)
                    row_counts[row] += 1
                    correction = math.sqrt(1 - scalars[BETA2] ** row_counts[row])
                    step_size = step_size * correction / (1 - scalars[BETA1] ** row_counts[row])
                    if corrects_eps:
                        eps = eps * correction
                m_key = state_key(row, job[KEY], rounds_state)
                p_key = weights_key(row, job[KEY], rounds_weights)
                p, m = pointer(p_at + row * p_bytes, P), pointer(m_at + row * m_bytes, M)
                v, u = pointer(v_at + row * v_bytes, V), pointer(job[U_AT] + row * v_bytes, V)
                one_minus_beta1 = N(1 - scalars[BETA1])
                beta2, one_minus_beta2 = N(scalars[BETA2]), N(1 - scalars[BETA2])
                rate, eps_n = N(step_size), N(eps)
                shrink_n, decay_n = only_if(shrink, N(scalars[SHRINK])), only_if(inner_decay, N(scalars[DECAY]))
                if is_by_row:
                    if has_decay:
                        # L2 is in the squares too. If the rule is going to turn g around, the decay is turned here.
                        factor = N(-scalars[DECAY]) if turns else N(scalars[DECAY])
                        for c in range(columns):
                            total[c] = g[c] + factor * widen(p[c], N)
                        g_row_at, g = total_at, total
                    square = N(sum_of_squares(g_row_at, columns, N) / max(columns, 1))
                    second = averaged(widen(v[0], N), square, beta2, one_minus_beta2, as_dense)
                    v[0] = narrow(second, V)
                    rate = rate / (math.sqrt(second) + eps_n)
                for c in range(columns):
                    p_c, m_c, v_c, u_c = rule(
                        widen(p[c], N), load(m, c, momentum, N), load(v, c, by_element, N), load(u, c, amsgrad, N),
                        g[c],
                        one_minus_beta1, beta2, one_minus_beta2, eps_n, rate, maximize, shrink_n, decay_n, as_dense,
                        math.sqrt, maximum,
                    )  # fmt: skip
                    store(p, c, p_c, P, first_bits(p_key, c))
                    bits = first_bits(m_key, c)
                    store(m, c, m_c, M, bits)
                    store(v, c, v_c, V, second_bits(bits))
                    store(u, c, u_c, V, second_bits(bits))  # by the bits of v, whose maximum it is
                if is_noted:
                    notes[row] = np.int32(job[NOTE])
        results[part] = result

    over_rows_part.__name__ = over_rows_part.__qualname__ = kind.name
    made = OverThreads(kernel(over_rows_part))
    made.number = str(N)
    return made


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

"""The walk over the rows that gradients name, and what is done with each: one flat function, made for each kind.

    group                     the ids by row (``ids``)
    sum                       the occurrences of a row, in order of occurrence, in a buffer that stays in the cache
    step                      the rule, with p, m and v of the row read and written once

It is flat because nesting costs: twenty compiled functions took 1.6 times as long to compile, and four times as long
for a small table (both on a busy machine). A *kind* says which types and options a kernel is made for. What is off in
it is None, a constant of the kernel, and leaves no code. What takes no time in a row's arithmetic is no part of the
kind but of the job: ``maximize`` and decoupled weight decay are factors, counts and notes of rows an address or 0. The
tests compiled 83 kernels when each of these was an option, and compile 50 now.

Names: ``p``, ``m``, ``v`` and ``u`` are the parameter, the moments and amsgrad's maximum, ``g`` the gradient. ``x_at``
is the address where x begins.
"""

from __future__ import annotations  # noqa: I001  a job's words on two lines, not on thirty

import functools
import math
from typing import Any, NamedTuple

from numba import njit, types

from .._rules import adam
from . import INLINE
from .cache import kernel
from .floats import load, narrow, store, widen
from .job import (
    BETA1, BETA2, COLUMNS, COUNTS_AT, DECAY, EPS, G_AT, G_STRIDE, GROUP_AT, HIGH, JOB, JOB_BYTES, JOB_COUNT, JOBS_AT,
    KEY, KEYS_AT, KEYS_FROM, LOW, M_AT, NOTE, NOTES_AT, P_AT, PIECE_BYTES, PIECES_AT, POSITION_BITS, POWER, RESULTS_AT,
    ROW_BITS, ROW_COUNT, SHRINK, SIGN, SPARE_AT, STEP_SIZE, TOTALS_AT, TOTALS_STRIDE, U_AT, V_AT,
)  # fmt: skip
from .pointers import CACHE_LINE, call_group, only_if, pointer, prefetch
from .pool import OverThreads
from .rounding import bits_of
from .share import SHARE_BITS
from .vectors import sum_of_squares

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
    """``step`` or ``norm``: what is done with the summed gradient of a row.

    A norm is summed by the upper bits of rows, which no two threads share, into what is told in place of the weights.
    """
    momentum: Any = True
    by_row: Any = None
    amsgrad: Any = None
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


_I, _F64 = types.int64, types.float64


@functools.cache
def over_rows(kind: Kind) -> OverThreads:
    """The kernel of a kind, to be called for all parts of a launch."""
    P, M, V, G, N, work = kind[:6]  # noqa: N806
    momentum, by_row, amsgrad, decay, as_dense, skip_nonfinite, rounds_state, rounds_weights = kind[6:]
    is_step = work == "step"
    p_size, m_size, v_size, g_size = (each.bitwidth // 8 for each in kind[:4])
    in_place = G == N  # a single occurrence is used where it lies
    is_by_row, has_momentum = by_row is not None, momentum is not None
    has_decay, skips, corrects_eps = decay is not None, skip_nonfinite is not None, as_dense is not None
    by_element = None if is_by_row else True
    inner_decay = None if is_by_row else decay
    state_key, _, state_bits, second_bits = bits_of(rounds_state)
    _, weights_key, weights_bits, _ = bits_of(rounds_weights)

    def over_rows_part(part, told_at):
        launch = pointer(told_at, _I)
        total_at = launch[TOTALS_AT] + part * launch[TOTALS_STRIDE]
        total = pointer(total_at, N)
        result = 0.0
        first, last = 0, launch[JOB_COUNT]
        heads, is_shared = pointer(launch[PIECES_AT], _I), launch[PIECES_AT] != 0
        if is_shared:
            first, last = heads[1 + part], heads[2 + part]
        for number in range(first, last):
            job_at, keys_at, spare_at = launch[JOBS_AT] + number * JOB_BYTES, launch[KEYS_AT], launch[SPARE_AT]
            piece = pointer(launch[PIECES_AT] + (heads[0] + 2) * 8 + number * PIECE_BYTES, _I) if is_shared else heads
            if is_shared:
                job_at = launch[JOBS_AT] + piece[JOB] * JOB_BYTES
                keys_at, spare_at = keys_at + piece[KEYS_FROM] * 8, spare_at + piece[KEYS_FROM] * 8
            job, scalars = pointer(job_at, _I), pointer(job_at, _F64)
            low, high = 0, job[ROW_COUNT]
            if is_shared:
                low, high = piece[LOW], piece[HIGH]
            end = call_group(launch[GROUP_AT], job_at, low, high, keys_at, spare_at)
            if end < 0:
                end, keys_at = ~end, spare_at
            keys, columns, shift = pointer(keys_at, _I), job[COLUMNS], job[POSITION_BITS]

            g_at, g_stride, g_bytes = job[G_AT], job[G_STRIDE], columns * g_size
            p_at, m_at, v_at = job[P_AT], job[M_AT], job[V_AT]
            p_bytes, m_bytes, v_bytes = columns * p_size, columns * m_size, (1 if is_by_row else columns) * v_size
            row_bytes = p_bytes + v_bytes + (m_bytes if has_momentum else 0)
            g_ahead = G_LINES_AHEAD // (g_bytes // CACHE_LINE + 1) + 1
            rows_ahead = TABLE_LINES_AHEAD // (row_bytes // CACHE_LINE + 1) + 1
            # Read here, once: for all that LLVM knows, a row that is written may lie over the job.
            notes, row_counts, u_at = pointer(job[NOTES_AT], types.int32), pointer(job[COUNTS_AT], _I), job[U_AT]
            is_noted, is_counted, note, key = job[NOTES_AT] != 0, job[COUNTS_AT] != 0, job[NOTE], job[KEY]
            beta1, eps, step_size = scalars[BETA1], scalars[EPS], scalars[STEP_SIZE]
            one_minus_beta1, beta2, one_minus_beta2 = N(1 - beta1), N(scalars[BETA2]), N(1 - scalars[BETA2])
            rate_of_all, eps_of_all, sign_of_all = N(step_size), N(eps), N(scalars[SIGN])
            shrink, decay_by = N(scalars[SHRINK]), N(scalars[DECAY])
            decay_n = only_if(inner_decay, decay_by)
            position_mask, here = (1 << shift) - 1, 0
            while here < end:
                # Sum the occurrences of a row, and ask for the memory that those after them will need. Every
                # occurrence's gradient is asked for, not only the first of a row: under Zipf ids most of the time goes
                # into gradient rows that lie in random order.
                row, begin = keys[here] >> shift, here
                g_row_at = g_at + (keys[here] & position_mask) * g_stride
                first_g = pointer(g_row_at, G)
                if not in_place:
                    g_row_at = total_at
                    for c in range(columns):
                        total[c] = widen(first_g[c], N)
                while here < end and keys[here] >> shift == row:
                    there = here + g_ahead
                    if there < end:
                        prefetch(g_at + (keys[there] & position_mask) * g_stride, g_bytes)
                    there = here + rows_ahead
                    if is_step and there < end and keys[there] >> shift != keys[there - 1] >> shift:
                        ahead = keys[there] >> shift
                        prefetch(p_at + ahead * p_bytes, p_bytes)
                        if has_momentum:
                            prefetch(m_at + ahead * m_bytes, m_bytes)
                        prefetch(v_at + ahead * v_bytes, v_bytes)
                    if here > begin:
                        if in_place and here == begin + 1:
                            g_row_at = total_at
                            for c in range(columns):
                                total[c] = first_g[c]
                        more = pointer(g_at + (keys[here] & position_mask) * g_stride, G)
                        for c in range(columns):
                            total[c] += widen(more[c], N)
                    here += 1
                g = pointer(g_row_at, N)

                if not is_step:
                    sums, block = pointer(p_at, _F64), row >> max(0, job[ROW_BITS] - SHARE_BITS)
                    power, so_far = pointer(told_at, _F64)[POWER], sums[block]
                    if power == 2.0:
                        so_far += sum_of_squares(g_row_at, columns, N)
                    elif power == math.inf:
                        for c in range(columns):  # written so that a NaN, once seen, stays
                            size = _F64(abs(g[c]))
                            so_far = so_far if so_far >= size or so_far != so_far else size
                    else:
                        for c in range(columns):
                            so_far += _F64(abs(g[c])) ** power if g[c] != 0 else 0.0
                    sums[block] = so_far
                    continue
                if skips:
                    is_finite = True
                    for c in range(columns):
                        is_finite &= math.isfinite(g[c])
                    if not is_finite:
                        result += 1
                        continue

                # Step the row, unless a signal's handler has brought it past this step.
                if is_noted and notes[row] >= note:
                    continue
                rate, eps_n, sign = rate_of_all, eps_of_all, sign_of_all
                if is_counted:
                    row_counts[row] += 1
                    correction = math.sqrt(1 - scalars[BETA2] ** row_counts[row])
                    rate = N(step_size * correction / (1 - beta1 ** row_counts[row]))
                    if corrects_eps:
                        eps_n = N(eps * correction)
                m_key, p_key = state_key(row, key), weights_key(row, key)
                p, m = pointer(p_at + row * p_bytes, P), pointer(m_at + row * m_bytes, M)
                v, u = pointer(v_at + row * v_bytes, V), pointer(u_at + row * v_bytes, V)
                if is_by_row:
                    if has_decay:  # it is in the squares too
                        for c in range(columns):
                            total[c] = sign * g[c] + decay_by * widen(p[c], N)
                        g_row_at, g, sign = total_at, total, N(1)
                    square = N(sum_of_squares(g_row_at, columns, N) / max(columns, 1))
                    second = averaged(widen(v[0], N), square, beta2, one_minus_beta2, as_dense)
                    v[0] = narrow(second, V)
                    rate = rate / (math.sqrt(second) + eps_n)
                for c in range(columns):
                    p_c, m_c, v_c, u_c = rule(
                        widen(p[c], N), load(m, c, momentum, N), load(v, c, by_element, N), load(u, c, amsgrad, N),
                        sign * g[c],
                        one_minus_beta1, beta2, one_minus_beta2, eps_n, rate, None, shrink, decay_n, as_dense,
                        math.sqrt, maximum,
                    )  # fmt: skip
                    store(p, c, p_c, P, weights_bits(p_key, c))
                    bits = state_bits(m_key, c)
                    store(m, c, m_c, M, bits)
                    store(v, c, v_c, V, second_bits(bits))
                    store(u, c, u_c, V, second_bits(bits))  # by the bits of v, whose maximum it is
                if is_noted:
                    notes[row] = types.int32(note)
        pointer(launch[RESULTS_AT], _F64)[part] = result
        return _I(result)

    over_rows_part.__name__ = over_rows_part.__qualname__ = kind.name
    return OverThreads(kernel(_I, _I)(over_rows_part), N)

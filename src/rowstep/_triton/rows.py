"""Sum the occurrences of each row, and step it: the kernels of a step. ``rowstep._triton`` says why none meet.

Names are those of ``_kernels/rows``: ``p``, ``m``, ``v`` and ``u`` are the parameter, the moments and amsgrad's
maximum, ``g`` is the gradient. What a table does not keep is None, and leaves no code. Scalars come in float64, which
has to be said: Triton takes a Python float for a float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .numbers import averaged, bits_of, load, maximum, root, rule, state_key, store, weights_key, widen

CHUNK = 64
"""Runs shorter than this are summed in order of occurrence. Of longer ones, whole chunks are summed first, side by
side: the one program of an id that is in every bag of a batch has a 64th of the numbers left to add."""

_CHUNK = tl.constexpr(CHUNK)

_AT_ONCE = tl.constexpr(4)
"""How many occurrences, or chunks, of a run are loaded together. For sm_90 and 64 columns that takes 38 registers, as
one at a time did, or 44 with chunks; 8 took 62 and 64, and with 1,500 columns 95 and 105 instead of 71 and 72."""


@triton.jit
def _are_of_row(chunks_there, rows, at, count, row):
    """Whether so many whole chunks from a position on lie in the run of a row."""
    last = at + chunks_there * _CHUNK - 1
    return tl.load(rows + last, mask=last < count, other=~row) == row  # behind the end there is none, not even of -1


@triton.jit
def run_sum(gradient, run, row, columns, N: tl.constexpr):
    """The sum over the run of a row that begins at position ``run``, for these columns."""
    chunks, values, row_stride, column_stride, order, rows, count, width = gradient
    is_there, offsets = columns < width, columns.to(tl.int64) * column_stride
    total, at, goes_on = tl.zeros(columns.shape, N), run, tl.full((), 1, tl.int1)
    while goes_on:
        if chunks is not None:  # noqa: SIM102  decided when the kernel is compiled
            if at % _CHUNK == 0:
                while _are_of_row(_AT_ONCE, rows, at, count, row):
                    for n in tl.static_range(_AT_ONCE):
                        place = chunks + (at // _CHUNK + n) * width + columns
                        total += tl.load(place, mask=is_there, other=0.0)
                    at += _AT_ONCE * _CHUNK
                while _are_of_row(1, rows, at, count, row):
                    total += tl.load(chunks + at // _CHUNK * width + columns, mask=is_there, other=0.0)
                    at += _CHUNK
        # Only values are masked, and those of another row add 0: no row number waits for the one before, nor a value.
        end = count if chunks is None else tl.minimum(count, (at // _CHUNK + 1) * _CHUNK)
        for n in tl.static_range(_AT_ONCE):
            position = tl.minimum(at + n, end - 1)
            is_of_row = tl.load(rows + position) == row
            place = values + tl.load(order + position) * row_stride + offsets
            total += load(place, is_there & is_of_row & (at + n < end), N)
        at = tl.minimum(at + _AT_ONCE, end)
        goes_on = is_of_row & (at < count)
    return total


@triton.jit(do_not_specialize=["count"])
def sum_chunks(
    chunks, values, row_stride: tl.int64, column_stride, order, rows, count: tl.int64, width,
    N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum the chunks of the sorted occurrences that lie in one run. Grid: whole chunks, blocks of columns."""
    chunk = tl.program_id(0).to(tl.int64)
    first = chunk * _CHUNK
    if tl.load(rows + first) == tl.load(rows + first + _CHUNK - 1):
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        total, offsets = tl.zeros((BLOCK,), N), columns.to(tl.int64) * column_stride
        for at in tl.range(_CHUNK, loop_unroll_factor=8):
            place = values + tl.load(order + first + at) * row_stride + offsets
            total += load(place, columns < width, N)
        tl.store(chunks + chunk * width + columns, total, mask=columns < width)


@triton.jit(do_not_specialize=["count", "row_count", "note", "key"])
def step_rows(
    p, m, v, u, counts, notes,
    chunks, values, row_stride: tl.int64, column_stride, order, rows, count: tl.int64, width,
    row_count: tl.int64, outside, skipped, stale, note: tl.int64, key: tl.int64,
    log_beta1: tl.float64, log_beta2: tl.float64, one_minus_beta1: tl.float64,
    beta2: tl.float64, one_minus_beta2: tl.float64, eps: tl.float64, step_size: tl.float64,
    shrink: tl.float64, decay: tl.float64, sign: tl.float64,
    HAS_DECAY: tl.constexpr, AS_DENSE: tl.constexpr, BY_ROW: tl.constexpr, ROUNDS_STATE: tl.constexpr,
    ROUNDS_WEIGHTS: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, IS_WIDE: tl.constexpr,
):  # fmt: skip
    """Step each row that the sorted row numbers name. Grid: their count."""
    here = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + here)
    if (here > 0) & (row == tl.load(rows + here - 1, mask=here > 0, other=0)):
        return
    lowest, highest = tl.load(rows), tl.load(rows + count - 1)
    if (lowest < 0) | (highest >= row_count):
        # Nothing of the table moves, as if it had had no gradient in this step.
        tl.store(outside, tl.where(lowest < 0, lowest, highest + 1), mask=here == 0)
        return
    if notes is not None:
        noted = tl.load(notes + row)
        if noted + 1 != note:  # what has reached this step was brought past it by a signal's handler
            tl.store(stale + here, 1, mask=noted + 1 < note)
            return
    gradient = (chunks, values, row_stride, column_stride, order, rows, count, width)
    first_columns = tl.arange(0, BLOCK)
    if not IS_WIDE:
        g = run_sum(gradient, here, row, first_columns, N)
    sign_n, decay_n = tl.full((), sign, N), tl.full((), decay, N) if HAS_DECAY else None

    # What the whole row decides: whether it is finite, and the mean of its squares.
    if (skipped is not None) or BY_ROW:
        flaws, squares = tl.zeros((), tl.int32), tl.zeros((), tl.float64)
        for start in range(0, width, BLOCK):
            columns = start + first_columns
            if IS_WIDE:
                g = run_sum(gradient, here, row, columns, N)
            if skipped is not None:
                flaws += tl.sum((tl.abs(g) < float("inf")).to(tl.int32) ^ 1)
            if BY_ROW:
                p_c = load(p + row * width + columns, columns < width, N) if HAS_DECAY else None
                whole = (sign_n * g + decay_n * p_c if HAS_DECAY else g).to(tl.float64)
                squares += tl.sum(whole * whole)
        if skipped is not None:  # noqa: SIM102  decided when the kernel is compiled
            if flaws > 0:
                tl.store(skipped + here, tl.load(skipped + here) + 1)
                return

    rate, eps_n = tl.full((), step_size, tl.float64), tl.full((), eps, tl.float64)
    taken = tl.load(counts + row) + 1 if counts is not None else None
    r = widen(tl.load(v + row), N) if BY_ROW else None
    tl.debug_barrier()  # every warp has read what one of them writes
    if counts is not None:
        tl.store(counts + row, taken)
        second = root(1 - tl.exp(taken.to(tl.float64) * log_beta2))
        rate = rate * second / (1 - tl.exp(taken.to(tl.float64) * log_beta1))
        if AS_DENSE is not None:
            eps_n = eps_n * second
    rate, eps_n = rate.to(N), eps_n.to(N)
    beta2_n, one_minus_beta2_n = tl.full((), beta2, N), tl.full((), one_minus_beta2, N)
    if BY_ROW:
        r = averaged(r, (squares / width).to(N), beta2_n, one_minus_beta2_n, AS_DENSE)
        store(v + row, None, r, None)
        rate = rate / (root(r) + eps_n)

    for start in range(0, width, BLOCK):
        columns = start + first_columns
        is_there, at = columns < width, row * width + columns
        if IS_WIDE:
            g = run_sum(gradient, here, row, columns, N)
        m_c = load(m + at, is_there, N) if m is not None else None
        v_c = load(v + at, is_there, N) if not BY_ROW else None
        u_c = load(u + at, is_there, N) if u is not None else None
        p_c, m_c, v_c, u_c = rule(
            load(p + at, is_there, N), m_c, v_c, u_c, sign_n * g,
            tl.full((), one_minus_beta1, N), beta2_n, one_minus_beta2_n, eps_n, rate,
            None, tl.full((), shrink, N), decay_n, AS_DENSE, root, maximum,
        )  # fmt: skip
        p_bits = bits_of(weights_key(key, row), columns) if ROUNDS_WEIGHTS else None
        m_bits = bits_of(state_key(key, row), columns) if ROUNDS_STATE else None
        v_bits = m_bits >> 16 if ROUNDS_STATE else None
        store(p + at, is_there, p_c, p_bits)
        if m is not None:
            store(m + at, is_there, m_c, m_bits)
        if not BY_ROW:
            store(v + at, is_there, v_c, v_bits)
        if u is not None:
            store(u + at, is_there, u_c, v_bits)  # by the bits of v, whose maximum it is
    if notes is not None:
        tl.store(notes + row, note.to(tl.int32))


@triton.jit(do_not_specialize=["count"])
def norm_rows(
    chunks, values, row_stride: tl.int64, column_stride, order, rows, count: tl.int64, width, sums,
    power: tl.float64, IS_LARGEST: tl.constexpr, IS_SQUARE: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sum of |g|^power over each row, in float64, or the largest |g|; where no run begins, 0. Grid: the count."""
    here = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + here)
    result = tl.zeros((), tl.float64)
    if (here == 0) | (row != tl.load(rows + here - 1, mask=here > 0, other=0)):
        gradient = (chunks, values, row_stride, column_stride, order, rows, count, width)
        for start in range(0, width, BLOCK):
            size = tl.abs(run_sum(gradient, here, row, start + tl.arange(0, BLOCK), N)).to(tl.float64)
            if IS_LARGEST:
                result = maximum(result, tl.max(tl.where(size != size, 0.0, size), axis=0))
                result = tl.where(tl.sum((size != size).to(tl.int32), axis=0) > 0, float("nan"), result)
            elif IS_SQUARE:  # without the rest, which is a hundred operations in float64
                result += tl.sum(size * size, axis=0)
            else:
                powers = tl.exp(power * tl.log(tl.where(size == 0, 1.0, size)))
                result += tl.sum(tl.where(size == 0, 0.0, powers), axis=0)
    tl.store(sums + here, result)

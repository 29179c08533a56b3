"""A row's deferred steps, made up for in one update: the kernel. ``rowstep._deferred`` derives what it computes.

It follows the reference's ``catch_up`` line by line. Whether the series is good enough is decided for each block of
columns, not for the row: where it is, both ways give the same.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._schedule import COARSE, COEFFICIENTS, EBAR, FINE, KEPT, M0, M2, M3, M4, M5, UNSAFE_UP_TO
from .numbers import bits_of, load, root, state_key, store, weights_key, widen

# On the device a step has the coefficients that were frozen for it and, behind them, what it was like. All of it is
# sent as integers, since the logarithms of what decay leaves are two integers; the rest are the bits of floats.
_COEFFICIENTS, _RING_COLUMNS = tl.constexpr(COEFFICIENTS), tl.constexpr(COEFFICIENTS + 4)
_RATE, _ROOT, _LOG_KEPT = (tl.constexpr(COEFFICIENTS + n) for n in range(3))
_COARSE, _FINE = tl.constexpr(COARSE), tl.constexpr(FINE)
_M0, _EBAR, _M2, _M3, _M4, _M5 = map(tl.constexpr, (M0, EBAR, M2, M3, M4, M5))
_UNSAFE_UP_TO, _KEPT = tl.constexpr(UNSAFE_UP_TO), tl.constexpr(KEPT)


@triton.jit
def coefficient(place, n: tl.constexpr):
    """One of a gap's coefficients: in the window or, of a longer gap, frozen."""
    window, ring, gap, length, frozen_at = place
    in_window = tl.load(window + gap * _COEFFICIENTS + n, mask=gap <= length, other=0.0)
    frozen = tl.load(ring + frozen_at * _RING_COLUMNS + n, mask=gap > length, other=0)
    return in_window + frozen.to(tl.float64, bitcast=True)


@triton.jit
def kept_since(ring, now, slot):
    """What weight decay leaves of a weight from the step in this slot to the one in ``now``."""
    until, since = ring + now * _RING_COLUMNS + _LOG_KEPT, ring + slot * _RING_COLUMNS + _LOG_KEPT
    coarse, fine = tl.load(until) - tl.load(since), tl.load(until + 1) - tl.load(since + 1)
    return tl.exp(coarse.to(tl.float64) * _COARSE + fine.to(tl.float64) * _FINE)


@triton.jit
def aged_by(moment, power):
    """A moment times a power of its beta, which may be too small for the moment's type. Infinity stays."""
    return tl.where(tl.abs(moment) == float("inf"), moment, (moment.to(tl.float64) * power).to(moment.dtype))


@triton.jit(do_not_specialize=["first", "count", "row_count", "step", "key"])
def catch_up_rows(
    p, m, v, u, notes,
    ids, first: tl.int64, count: tl.int64, row_count: tl.int64, width, outside,
    window, ring, length: tl.int64, capacity: tl.int64, step: tl.int64, key: tl.int64,
    log_beta1: tl.float64, log_beta2: tl.float64, ratio: tl.float64, growth: tl.float64, eps: tl.float64,
    dust: tl.float64, smallest: tl.float64, BLOCK: tl.constexpr,
    BY_ROW: tl.constexpr, ROUNDS_STATE: tl.constexpr, ROUNDS_WEIGHTS: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Bring to ``step`` the rows that sorted ids name, or all. Grid: how many of them, from the ``first`` on."""
    here = first + tl.program_id(0)
    row = here
    if ids is not None:
        row = tl.load(ids + here)
        if (here > 0) & (row == tl.load(ids + here - 1, mask=here > 0, other=0)):
            return
        lowest, highest = tl.load(ids), tl.load(ids + count - 1)
        is_outside = (lowest < 0) | (highest >= row_count)
        tl.store(outside, tl.where(lowest < 0, lowest, highest + 1), mask=is_outside & (here == 0))
        if (row < 0) | (row >= row_count):
            return
    start = tl.load(notes + row).to(tl.int64)
    gap = step - start
    if gap <= 0:
        return
    r = widen(tl.load(v + row), N) if BY_ROW else None
    tl.debug_barrier()  # every warp has read what one of them writes
    tl.store(notes + row, step.to(tl.int32))

    now = step % capacity
    place = (window, ring, gap, length, start % capacity)
    aged = tl.where(gap > length, kept_since(ring, now, (start + length) % capacity), 1.0)
    kept, aged = (coefficient(place, _KEPT) * aged).to(N), aged.to(N)
    power1, power2 = tl.exp(gap.to(tl.float64) * log_beta1), tl.exp(gap.to(tl.float64) * log_beta2)
    bound = coefficient(place, _UNSAFE_UP_TO)
    bound = tl.where(bound > 0, bound, -1.0).to(N)  # no second moment is below that
    mean = tl.maximum(coefficient(place, _EBAR), tl.full((), smallest, tl.float64)).to(N)
    if BY_ROW:
        store(v + row, None, aged_by(r, power2), None)

    for offset in range(0, width, BLOCK):
        columns = offset + tl.arange(0, BLOCK)
        is_there, at = columns < width, row * width + columns
        p_bits = bits_of(weights_key(key, row), columns) if ROUNDS_WEIGHTS else None
        m_bits = bits_of(state_key(key, row), columns) if ROUNDS_STATE else None
        v_bits = m_bits >> 16 if ROUNDS_STATE else None
        p_c = kept * load(p + at, is_there, N)
        if not BY_ROW:
            v_c = load(v + at, is_there, N)
            store(v + at, is_there, aged_by(v_c, power2), v_bits)
        if m is not None:
            m_c = load(m + at, is_there, N)
            # amsgrad's largest second moment does not decay.
            divisor = r + tl.zeros((BLOCK,), N) if BY_ROW else load(u + at, is_there, N) if u is not None else v_c
            unsafe = (divisor <= bound) & (m_c != 0)
            if tl.max(unsafe.to(tl.int32), axis=0) == 0:
                # All missed steps at once, with the sum expanded around the mean of e. m is divided first.
                inverse = 1 / (root(divisor) + mean)
                theta = mean * inverse
                series = coefficient(place, _M4).to(N) - theta * coefficient(place, _M5).to(N)
                series = coefficient(place, _M2).to(N) - theta * (coefficient(place, _M3).to(N) - theta * series)
                series = coefficient(place, _M0).to(N) + theta * theta * series
                moves = m_c * inverse * (aged * series)
            else:
                # The moves one by one; a term whose e is infinite is 0.
                moves, divisor_root = tl.zeros((BLOCK,), N), root(divisor)
                weight, e = tl.full((), 1.0, tl.float64), tl.full((), eps, tl.float64)
                for j in range(1, tl.minimum(gap, length) + 1):
                    slot = (start + j) % capacity
                    entry = ring + slot * _RING_COLUMNS
                    weight, e = weight * ratio, e * growth
                    rate = tl.load(entry + _RATE).to(tl.float64, bitcast=True)
                    correction = tl.load(entry + _ROOT).to(tl.float64, bitcast=True)
                    w_j = rate * kept_since(ring, now, slot) * weight
                    e_j = tl.maximum(correction * e, tl.full((), smallest, tl.float64))
                    moves += w_j.to(N) * (m_c / (divisor_root + e_j.to(N)))
            p_c = p_c - moves
            m_c = aged_by(m_c, power1)
            store(m + at, is_there, tl.where(tl.abs(m_c) < tl.full((), dust, N), 0.0, m_c), m_bits)
        store(p + at, is_there, p_c, p_bits)

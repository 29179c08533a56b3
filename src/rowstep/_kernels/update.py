"""Visits of the walk: a step of the rule for each row, and whether a row's gradient is finite.

Each row's p, m and v are read and written once, in one fused loop, with each operation rounded on its own. With a
second moment per row there is a loop before it, over the gradient alone, for the mean of its squares.

An option that is off arrives as None. Numba types None apart and drops the branches that test for it, so every
combination of options is a kernel of its own, compiled when it is first used.

Names: ``p``, ``m``, ``v`` and ``u`` are the parameter, the moments and amsgrad's maximum, ``g`` the gradient. ``x_at``
is the address where x begins, ``x_like`` an empty array of its element type. ``like`` has the type computed with.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from .._rules import adam
from . import INLINE
from .cache import kernel
from .floats import optional_number, widen
from .memory import (
    CACHE_LINE,
    address_of,
    borrowed,
    float64s_at,
    int32s_at,
    int64s_at,
    is_there,
    only_if,
    optional_row_at,
    prefetch,
    row_at,
    unless,
)
from .norm import sum_of_squares
from .pool import OverThreads
from .rounding import state_key, stored_first, stored_second, weights_key
from .walk import COLUMNS, JOB_WORDS, ROW_COUNT, ask_for_nothing, over_gradient, piece_of

# The words of a job that say where a table and its state are, the note that its rows get, and the key of random
# rounding. The scalars follow.
P_AT, M_AT, V_AT, U_AT, COUNTS_AT, NOTES_AT, NOTE, KEY, SCALARS = range(8, 17)
BETA1, BETA2, EPS, STEP_SIZE, SHRINK, DECAY = range(6)
SCALAR_WORDS = 6

# How many cache lines to have under way of the tables; see walk.py for those of the gradient.
_TABLE_LINES_AHEAD = 48

rule = njit(**INLINE)(adam.update)
averaged = njit(**INLINE)(adam.averaged)
corrections = njit(**INLINE)(adam.corrections)


@kernel
def update_part(
    part, totals, skipped, jobs, pieces, keys_at, spare_at, p_like, m_like, v_like, g_like,
    momentum, by_row, amsgrad, counted, noted, maximize, shrink, decay, as_dense, skip_nonfinite,
    rounds_state, rounds_weights,
):  # fmt: skip
    """Step the rows of one part of the jobs; leave in ``skipped[part]`` how many were left out.

    Duplicates are summed in the part's row of ``totals``.
    """
    total_at = address_of(totals) + part * totals.shape[1] * totals.itemsize
    like, p_like, g_like = borrowed(totals), borrowed(p_like), borrowed(g_like)
    m_like, v_like = borrowed(m_like), borrowed(v_like)
    jobs, pieces = borrowed(jobs), borrowed(pieces)
    first, last = (0, jobs.size // JOB_WORDS) if pieces.size == 0 else (pieces[1 + part], pieces[2 + part])
    left_out = np.int64(0)
    for number in range(first, last):
        job, low, high, keys_from = piece_of(number, jobs, pieces)
        columns = job[COLUMNS]
        p_bytes, m_bytes = columns * p_like.itemsize, columns * m_like.itemsize
        v_columns = np.int64(1) if is_there(by_row) else columns
        v_bytes = v_columns * v_like.itemsize
        places = (job[P_AT], job[M_AT], job[V_AT], p_bytes, m_bytes, v_bytes, columns, v_columns, total_at)
        types = (p_like, m_like, v_like)
        scalars = float64s_at(address_of(job) + SCALARS * 8, SCALAR_WORDS)
        second = (momentum, by_row, amsgrad, rounds_state, rounds_weights)
        options = (counted, noted, maximize, shrink, decay, as_dense, skip_nonfinite)
        row_bytes = p_bytes + v_bytes + (m_bytes if is_there(momentum) else np.int64(0))
        rows_ahead = _TABLE_LINES_AHEAD // (row_bytes // CACHE_LINE + 1) + 1
        left_out = over_gradient(
            job, low, high, keys_from, keys_at, spare_at, total_at, like, g_like,
            rows_ahead, ask_for_row, step_row, (places, types, job, scalars, second, options), left_out,
        )  # fmt: skip
    skipped[part] = left_out


update = OverThreads(update_part)


@njit(**INLINE)
def ask_for_row(row, table):
    p_at, m_at, v_at, p_bytes, m_bytes, v_bytes, _, _, _ = table[0]
    prefetch(p_at + row * p_bytes, p_bytes)
    if is_there(table[4][0]):
        prefetch(m_at + row * m_bytes, m_bytes)
    prefetch(v_at + row * v_bytes, v_bytes)


@njit(**INLINE)
def step_row(row, g, table, left_out):
    """Step one row, and count it if it is left out."""
    places, types, job, scalars, second, options = table
    momentum, by_row, amsgrad, rounds_state, rounds_weights = second
    counted, noted, maximize, shrink, decay, as_dense, skip_nonfinite = options
    if is_left_out(g, skip_nonfinite):
        return left_out + 1
    p_at, m_at, v_at, p_bytes, m_bytes, v_bytes, columns, v_columns, total_at = places
    p_like, m_like, v_like = types
    step_size, eps = count_row(job[COUNTS_AT], row, scalars, counted, as_dense)
    p = row_at(p_at + row * p_bytes, columns, p_like)
    m = optional_row_at(momentum, m_at + row * m_bytes, columns, m_like)
    v = row_at(v_at + row * v_bytes, v_columns, v_like)
    m_key, p_key = state_key(row, job[KEY], rounds_state), weights_key(row, job[KEY], rounds_weights)
    shrink, decay = only_if(shrink, scalars[SHRINK]), only_if(decay, scalars[DECAY])
    u = optional_row_at(amsgrad, job[U_AT] + row * v_bytes, columns, v_like)
    numbers = (scalars[BETA1], scalars[BETA2], eps, step_size)
    update_either(
        p, m, v, u, g, by_row, unless(by_row), numbers, maximize, shrink, decay, as_dense, m_key, p_key, total_at
    )  # fmt: skip
    if is_there(noted):
        int32s_at(job[NOTES_AT] + row * 4, 1)[0] = job[NOTE]
    return left_out


@njit(**INLINE)
def update_either(
    p, m, v, u, g, by_row, by_element, numbers, maximize, shrink, decay, as_dense, m_key, p_key, total_at
):
    """The rule for one row, with a second moment for each number or for the row."""
    beta1, beta2, eps, step_size = numbers
    if by_element is not None:
        update_row(
            p, m, v, u, g, beta1, beta2, eps, step_size, maximize, shrink, decay, as_dense, m_key, p_key
        )  # fmt: skip
    if by_row is not None:
        update_by_row(
            p, m, v, decayed_gradient(g, p, maximize, decay, total_at),
            beta1, beta2, eps, step_size, maximize, shrink, as_dense, m_key, p_key,
        )  # fmt: skip


@njit(**INLINE)
def update_row(p, m, v, u, g, beta1, beta2, eps, step_size, maximize, shrink, decay, as_dense, m_key, p_key):
    """The rule, for one row. ``g`` has the type computed with."""
    number = g.dtype.type
    one_minus_beta1, beta2, one_minus_beta2 = number(1 - beta1), number(beta2), number(1 - beta2)
    eps, step_size = number(eps), number(step_size)
    shrink, decay = optional_number(shrink, g), optional_number(decay, g)
    for c in range(p.size):
        u_c = None
        if u is not None:
            u_c = widen(u[c], g)
        p_c, m_c, v_c, u_c = rule(
            widen(p[c], g), widen(m[c], g), widen(v[c], g), u_c, g[c],
            one_minus_beta1, beta2, one_minus_beta2, eps, step_size, maximize, shrink, decay, as_dense,
            math.sqrt, maximum,
        )  # fmt: skip
        p[c] = stored_first(p_c, p, p_key, c)
        m[c], v[c] = stored_first(m_c, m, m_key, c), stored_second(v_c, v, m_key, c)
        if u is not None:
            u[c] = stored_second(u_c, u, m_key, c)  # by the bits of v, whose maximum it is


@njit(**INLINE)
def update_by_row(p, m, v, g, beta1, beta2, eps, step_size, maximize, shrink, as_dense, m_key, p_key):
    """The rule with a second moment per row, v[0]: one division for the row."""
    number = g.dtype.type
    one_minus_beta1, eps, step_size = number(1 - beta1), number(eps), number(step_size)
    shrink = optional_number(shrink, g)
    square = number(sum_of_squares(g) / max(g.size, 1))
    second = averaged(widen(v[0], g), square, number(beta2), number(1 - beta2), as_dense)
    v[0] = stored_first(second, v, None, 0)
    step_size = step_size / (math.sqrt(second) + eps)
    for c in range(p.size):
        m_c = None
        if m is not None:
            m_c = widen(m[c], g)
        p_c, m_c, _, _ = rule(
            widen(p[c], g), m_c, None, None, g[c],
            one_minus_beta1, None, None, eps, step_size, maximize, shrink, None, as_dense,
            math.sqrt, maximum,
        )  # fmt: skip
        p[c] = stored_first(p_c, p, p_key, c)
        if m is not None:
            m[c] = stored_first(m_c, m, m_key, c)


@njit(**INLINE)
def decayed_gradient(g, p, maximize, decay, total_at):
    """The gradient with L2 weight decay in it: its squares are needed before the rule comes to it.

    If the rule is going to turn it around, the decay is turned around here.
    """
    if decay is None:
        return g
    total, factor = row_at(total_at, g.size, g), g.dtype.type(-decay if is_there(maximize) else decay)
    for c in range(g.size):
        total[c] = g[c] + factor * widen(p[c], g)
    return total


@njit(**INLINE)
def maximum(u, v):
    """The larger one; a NaN on either side stays one, as torch.maximum has it."""
    return u if u > v or u != u else v


@njit(**INLINE)
def count_row(counts_at, row, scalars, counted, as_dense):
    """This row's step size and eps. Where rows are counted, count one step more for it."""
    step_size, eps = scalars[STEP_SIZE], scalars[EPS]
    if counted is not None:
        count = int64s_at(counts_at + row * 8, 1)
        count[0] += 1
        first, second = corrections(scalars[BETA1], scalars[BETA2], count[0], math.sqrt)
        step_size = step_size * second / first
        if as_dense is not None:
            eps = eps * second
    return step_size, eps


@njit(**INLINE)
def is_left_out(g, skip_nonfinite):
    if skip_nonfinite is None:
        return False
    return not all_finite(g)


@njit(**INLINE)
def all_finite(g):
    for number in g:  # noqa: SIM110  Numba compiles no generator expressions
        if not math.isfinite(number):
            return False
    return True


@kernel
def count_nonfinite(totals, job, keys_at, spare_at, g_like):
    """How many rows of one job have a summed gradient that is not finite."""
    like, g_like, job = borrowed(totals), borrowed(g_like), borrowed(job)
    return over_gradient(
        job, 0, job[ROW_COUNT], 0, keys_at, spare_at, address_of(totals), like, g_like,
        1, ask_for_nothing, add_if_nonfinite, None, 0,
    )  # fmt: skip


@njit(**INLINE)
def add_if_nonfinite(row, g, table, found):
    return found + (not all_finite(g))


@kernel
def step_part(part, totals, p, m, v, g, beta1, beta2, eps, step_size, shrink, decay):
    """Step one part of the elements of dense arrays, in blocks as wide as ``totals``, as torch.optim.Adam does.

    A block's gradient is widened to the type computed with, in memory that stays in the cache; then the update runs as
    if the block were a row. All arrays have one dimension and no gaps.
    """
    parts, width = totals.shape
    here, last = p.size * part // parts, p.size * (part + 1) // parts
    total_at = address_of(totals) + part * width * totals.itemsize
    while here < last:
        size = min(width, last - here)
        total = row_at(total_at, size, totals)
        for c in range(size):
            total[c] = widen(g[here + c], total)
        p_here = row_at(address_of(p) + here * p.itemsize, size, p)
        m_here = row_at(address_of(m) + here * m.itemsize, size, m)
        v_here = row_at(address_of(v) + here * v.itemsize, size, v)
        update_row(
            p_here, m_here, v_here, None, total, beta1, beta2, eps, step_size, None, shrink, decay, True, None, None
        )
        here += size


step = OverThreads(step_part)

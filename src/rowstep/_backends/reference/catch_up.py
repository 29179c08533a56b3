"""A row's deferred steps, taken in one stride: the specification. ``rowstep._deferred`` derives what it computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..._schedule import DUST_OF_EPS, EBAR, M0, M2, M3, M4, M5, SAFE, Schedule
from ..._state import State, compute_dtype
from ..gate import admit_notes, admit_rows, admit_table
from ..outcome import Outcome
from .adam import RowsOf

_ROWS_AT_ONCE = 1 << 16


def catch_up(param: Tensor, state: State, since: Tensor, schedule: Schedule, rows: Tensor | range) -> None:
    """Bring these rows of ``param`` and its moments from the steps in ``since`` to the schedule's."""
    lead = tuple(since.shape)
    admit_table(param, state, lead, amsgrad=schedule.amsgrad)
    admit_notes(since, lead)
    if isinstance(rows, Tensor):
        admit_rows(rows)
    else:
        rows = torch.arange(rows.start, rows.stop, device=since.device)
    stale = torch.unique(rows[since.view(-1)[rows] != schedule.step])
    for some in stale.split(_ROWS_AT_ONCE):
        _stride(param.data, state, since, schedule, some)  # .data: autograd's version counter must not see this


def _stride(param: Tensor, state: State, since: Tensor, schedule: Schedule, rows: Tensor) -> None:
    place = RowsOf(tuple(since.shape), rows)
    dtype = compute_dtype(param.dtype, state["exp_avg"].dtype)
    start = since.view(-1)[rows].cpu().numpy().astype(np.int64)
    table, kept, aged = (torch.from_numpy(array).to(rows.device) for array in schedule.coefficients(start))
    p, m, v = (place.read(tensor, dtype) for tensor in (param, state["exp_avg"], state["exp_avg_sq"]))
    divisor = place.read(state["max_exp_avg_sq"], dtype) if schedule.amsgrad else v

    moves = _move_by_series(m, divisor, table.to(dtype), aged.to(dtype))
    bound = table[:, SAFE : SAFE + 1]
    unsafe = ((bound > 0) & (divisor <= bound.to(dtype)) & (m != 0)).any(dim=1)
    for step in np.unique(start[unsafe.cpu().numpy()]).tolist():
        these = unsafe & torch.from_numpy(start == step).to(unsafe.device)
        moves[these] = _move_by_terms(m[these], divisor[these], schedule, step)

    gaps = schedule.step - start
    dust = min(torch.finfo(dtype).smallest_normal, schedule.eps * DUST_OF_EPS)
    p = kept.to(dtype).unsqueeze(1) * p - moves
    m = _decayed(m, schedule.beta1_powers[gaps])
    m = m.masked_fill(m.abs() < dust, 0)
    v = _decayed(v, schedule.beta2_powers[gaps])
    now = torch.full_like(rows, schedule.step)
    place.write([(param, p), (state["exp_avg"], m), (state["exp_avg_sq"], v), (since, now)], Outcome())


def _move_by_series(m: Tensor, divisor: Tensor, table: Tensor, aged: Tensor) -> Tensor:
    """m times the sum of w / (sqrt(v) + e), expanded around the mean of e.

    The mean is never 0, and m is divided before anything else: where m is 0, nothing but weight decay moves p.
    """
    term = {n: table[:, n : n + 1] for n in (M0, EBAR, M2, M3, M4, M5)}
    mean = term[EBAR].clamp(min=torch.finfo(m.dtype).smallest_normal)
    inverse = 1 / (divisor.sqrt() + mean)
    theta = mean * inverse
    series = term[M0] + theta**2 * (term[M2] - theta * (term[M3] - theta * (term[M4] - theta * term[M5])))
    return m * inverse * (aged.unsqueeze(1) * series)


def _move_by_terms(m: Tensor, divisor: Tensor, schedule: Schedule, start: int) -> Tensor:
    """The same, term by term: where the series is not good enough."""
    moves, root = torch.zeros_like(m), divisor.sqrt()
    weights, es = (torch.from_numpy(column).to(m.dtype).tolist() for column in schedule.terms(start))
    for weight, e in zip(weights, es, strict=True):
        moves += weight * (m / (root + max(e, torch.finfo(m.dtype).smallest_normal)))
    return moves


def _decayed(moment: Tensor, powers: Any) -> Tensor:
    """The moment times a power of its beta, which may be too small for the moment's dtype. Infinity stays."""
    power = torch.from_numpy(powers).to(moment.device).unsqueeze(1)
    return torch.where(moment.isinf(), moment, (moment.double() * power).to(moment.dtype))


def count_stale(since: Tensor, rows: Tensor, step: int) -> int:
    """How many of these row numbers name a row that is not up to date."""
    admit_notes(since, tuple(since.shape))
    admit_rows(rows)
    return int((since.view(-1)[rows] != step).sum())


def mark(since: Tensor, rows: Tensor, step: int) -> None:
    """Note that these rows are up to date at this step."""
    admit_notes(since, tuple(since.shape))
    admit_rows(rows)
    since.view(-1)[rows] = step

"""A row's deferred steps, made up for in one update: the specification. ``rowstep._deferred`` derives it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..._schedule import DUST_OF_EPS, EBAR, KEPT, M0, M2, M3, M4, M5, UNSAFE_UP_TO, Schedule
from ..._state import compute_dtype
from .adam import RowsOf
from .rounding import Noise

_ROWS_AT_ONCE = 1 << 16


@torch.no_grad()
def catch_up(pending: Any, rows: Tensor | range) -> bool:
    """Bring these rows of a table from the steps in their notes to the schedule's; False if one is not in the table."""
    notes = pending.notes
    if isinstance(rows, range):
        rows = torch.arange(rows.start, rows.stop, device=notes.device)
    rows = rows.reshape(-1)
    if ((rows < 0) | (rows >= notes.numel())).any():
        return False
    stale = torch.unique(rows[notes.view(-1)[rows] < pending.schedule.step])
    for some in stale.split(_ROWS_AT_ONCE):
        _catch_up(pending, some)
    return True


def _catch_up(pending: Any, rows: Tensor) -> None:
    table, notes, schedule = pending.table, pending.notes, pending.schedule
    param, slots, spec = table.param.data, table.slots, table.spec  # .data: autograd's version counter must not see it
    place = RowsOf(table.lead, rows)
    second = slots["exp_avg_sq_row" if spec.is_by_row else "exp_avg_sq"]
    dtype = compute_dtype(*table.dtypes)
    start = notes.view(-1)[rows].cpu().numpy().astype(np.int64)
    gaps = schedule.step - start
    terms, aged = (torch.from_numpy(array).to(rows.device) for array in schedule.coefficients(start))
    p, v = (place.read(tensor, dtype) for tensor in (param, second))
    p, m = (terms[:, KEPT] * aged).to(dtype).unsqueeze(1) * p, None
    if spec.has_momentum:
        m = place.read(slots["exp_avg"], dtype)
        divisor = place.read(slots["max_exp_avg_sq"], dtype) if spec.amsgrad else v
        moves = _move_by_series(m, divisor, terms.to(dtype), aged.to(dtype))
        bound = terms[:, UNSAFE_UP_TO : UNSAFE_UP_TO + 1]
        unsafe = ((bound > 0) & (divisor <= bound.to(dtype)) & (m != 0)).any(dim=1)
        for step in np.unique(start[unsafe.cpu().numpy()]).tolist():
            these = unsafe & torch.from_numpy(start == step).to(unsafe.device)
            moves[these] = _move_by_terms(m[these], divisor[these], schedule, step)
        p = p - moves
        dust = min(torch.finfo(dtype).smallest_normal, schedule.path.eps * DUST_OF_EPS)
        m = _decayed(m, schedule.path.beta1_powers[gaps])
        m = m.masked_fill(m.abs() < dust, 0)
    v = _decayed(v, schedule.path.beta2_powers[gaps])
    noise = Noise(pending.key, rows, p.shape[1])
    if pending.rounds_weights:
        p = noise.rounded_weights(p, param.dtype)
    if spec.is_rounded:
        of_elements = (v, None if spec.is_by_row else second)
        m, v, _ = noise.rounded_moments((m, slots.get("exp_avg")), of_elements, (None, None))
    changes = [(param, p), (second, v), (notes, torch.full_like(rows, schedule.step))]
    if m is not None:
        changes.append((slots["exp_avg"], m))
    place.write(changes)


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

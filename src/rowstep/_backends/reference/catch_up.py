"""A row's deferred steps, taken in one stride: the specification. ``rowstep._deferred`` derives what it computes."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..._schedule import EBAR, M0, M2, M3, M4, M5, SAFE, Schedule
from ..._state import State, compute_dtype
from ..gate import admit_notes, admit_rows, admit_table
from ..outcome import Outcome
from .adam import RowsOf

# A momentum this small moves nothing any more, and denormal numbers are slow.
_TINY_MOMENTUM = 1e-30

_ROWS_AT_ONCE = 1 << 16


def catch_up(param: Tensor, state: State, since: Tensor, schedule: Schedule, rows: Tensor | range) -> None:
    """Bring these rows of ``param`` and its moments from the steps in ``since`` to the schedule's."""
    lead = tuple(since.shape)
    admit_table(param, state, lead, amsgrad=schedule.amsgrad, counted=False)
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
    gaps = schedule.step - start
    beta1_power, beta2_power = (
        torch.from_numpy(powers[gaps]).to(rows.device, dtype).unsqueeze(1)
        for powers in (schedule.beta1_powers, schedule.beta2_powers)
    )
    p, m, v = (place.read(tensor, dtype) for tensor in (param, state["exp_avg"], state["exp_avg_sq"]))
    divisor = place.read(state["max_exp_avg_sq"], dtype) if schedule.amsgrad else v

    sums = _sum_by_series(divisor, table.to(dtype), aged.to(dtype))
    unsafe = ((divisor < table[:, SAFE : SAFE + 1].to(dtype)) & (m != 0)).any(dim=1)
    for step in np.unique(start[unsafe.cpu().numpy()]).tolist():
        these = unsafe & torch.from_numpy(start == step).to(unsafe.device)
        sums[these] = _sum_by_terms(divisor[these], schedule, step)

    p = kept.to(dtype).unsqueeze(1) * p - m * sums
    m = m * beta1_power
    m = m.masked_fill(m.abs() <= _TINY_MOMENTUM, 0)
    now = torch.full_like(rows, schedule.step)
    changes = [(param, p), (state["exp_avg"], m), (state["exp_avg_sq"], v * beta2_power), (since, now)]
    place.write(changes, Outcome())


def _sum_by_series(divisor: Tensor, table: Tensor, aged: Tensor) -> Tensor:
    """sum of w / (sqrt(v) + e), expanded around the mean of e."""
    term = {n: table[:, n : n + 1] for n in (M0, EBAR, M2, M3, M4, M5)}
    inverse = 1 / (divisor.sqrt() + term[EBAR])
    theta = term[EBAR] * inverse
    series = term[M0] + theta**2 * (term[M2] - theta * (term[M3] - theta * (term[M4] - theta * term[M5])))
    return aged.unsqueeze(1) * inverse * series


def _sum_by_terms(divisor: Tensor, schedule: Schedule, start: int) -> Tensor:
    """The same sum, term by term: where the series is not good enough."""
    sums, root = torch.zeros_like(divisor), divisor.sqrt()
    for weight, e in zip(*schedule.terms(start), strict=True):
        sums += float(weight) / (root + float(e))
    return sums


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

"""One stride against dense Adam in float64, over the whole plane of betas and all that meets it there.

A stride is held to what its row was when it began to wait, as it was stored: it must end where dense Adam in float64
ends from there, within the rounding of the dtype it is stored in and of the one it is computed in.
"""

from __future__ import annotations

import importlib
import math
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rowstep._backends import Backend, LateRows
from rowstep._schedule import DUST_OF_EPS, Schedule, check_betas, window_length
from rowstep._state import compute_dtype
from tests.helpers.deferred_cases import LONG, RATE, SCHEDULES

# Usual ones, both near 1, beta1 just below sqrt(beta2), beta2 far below beta1, tiny ones, and 0.
BETAS = [
    (0.9, 0.999),
    (0.9, 0.95),
    (0.9, 0.9),
    (0.95, 0.95),
    (0.5, 0.5),
    (0.3, 0.1),
    (0.7, 0.5),
    (0.0, 0.9),
    (0.0, 1e-12),
    (0.01, 2e-4),
    (1e-5, 1e-9),
    (1e-300, 0.9),
    (0.2, 1 - 1e-12),
]
LONG_BETAS = [(0.99, 0.999), (0.98, 0.98), (0.9, 0.85), (0.95, 0.94), (0.8, 0.8), (0.9, 0.92), (0.99, 0.9999)]
# The largest second moment divides: beta2 may be anything.
AMSGRAD_BETAS = [(0.9, 0.999), (0.9, 0.0), (0.0, 0.0), (0.95, 0.3), (0.5, 1e-300)]
LONG_AMSGRAD_BETAS = [(0.99, 0.5), (0.0, 0.999), (0.9, 0.81)]

EPS = [1e-8, 1e-30, 1e-3, 1.0, 1e-16, 1e4, 1e-50]
DECAYS = [0.0, 0.1, 30.0]
FIRST_STEPS = [0, 1, 40, 10**6]
SIZES = [0.0, 1e-30, 1e-25, 1e-20, 1e-12, 1e-8, 1e-4, 1.0, 1e4, 1e8, 1e12]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SMALLEST = 2.0**-1074
LONGEST_GAP = 1 << 30 if LONG else 450


@dataclass(frozen=True)
class Point:
    """The options of one run. Rows begin to wait at different steps of it, the first at ``first`` + 1."""

    betas: tuple[float, float]
    amsgrad: bool
    eps: float
    decay: float
    rate: str
    first: int

    def lr(self, step: int) -> float:
        return SCHEDULES[self.rate](step - self.first)


def points() -> list[Point]:
    """Every pair of betas with every eps, or in a quick run with three, and the other options in turn."""
    numbers = random.Random(0)
    plane = [(betas, False) for betas in BETAS + LONG_BETAS * LONG]
    plane += [(betas, True) for betas in AMSGRAD_BETAS + LONG_AMSGRAD_BETAS * LONG]
    found = []
    for place, (betas, amsgrad) in enumerate(plane):
        is_slow = window_length(*betas, amsgrad=amsgrad) > 2000
        chosen = EPS if LONG and not is_slow else [EPS[0], EPS[1], EPS[2 + place % 5]]
        for turn, eps in enumerate(chosen):
            rate, first = numbers.choice(list(SCHEDULES)), numbers.choice(FIRST_STEPS)
            found.append(Point(betas, amsgrad, eps, DECAYS[(place + turn) % 3], rate, first))
    return found


class Rows:
    """Rows as one gradient of each size leaves them, as a dtype stores them; for each gap the same rows."""

    def __init__(self, point: Point, gaps: list[int], dtype: torch.dtype) -> None:
        mixed = torch.tensor([0.0, -1e-30, 1.0, -1e12], dtype=torch.float64)
        signs = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
        g = torch.cat([torch.tensor(SIZES, dtype=torch.float64).unsqueeze(1) * signs, mixed.unsqueeze(0)])
        p = torch.tensor([0.0, 1.0, -3.0, 1e-3], dtype=torch.float64).expand_as(g)
        beta1, beta2 = point.betas
        self.gaps = np.repeat(gaps, len(g))
        self.p, self.m, self.v = (
            part.repeat(len(gaps), 1).to(dtype) for part in (p, (1 - beta1) * g, (1 - beta2) * g.square())
        )


def densely(point: Point, rows: Rows, last: int) -> dict[str, Any]:
    """Dense Adam in float64 without gradients, from where the rows begin to wait to the last step."""
    p, m, v = (part.double().numpy().copy() for part in (rows.p, rows.m, rows.v))
    largest = v.copy()
    beta1, beta2 = point.betas
    with np.errstate(all="ignore"):
        for step in range(last - int(rows.gaps.max()) + 1, last + 1):
            now = slice(int((rows.gaps > last - step).argmax()), None)  # the longest gaps come last
            p[now] *= 1 - point.lr(step) * point.decay
            m[now] *= beta1
            v[now] *= beta2
            root = np.sqrt(largest[now] if point.amsgrad else v[now]) / math.sqrt(1 - beta2**step)
            p[now] -= point.lr(step) / (1 - beta1**step) * (m[now] / (root + point.eps))
    return {"p": p, "exp_avg": m, "exp_avg_sq": v}


def in_one_stride(backend: str, schedule: Schedule, rows: Rows) -> dict[str, Any]:
    """What a backend makes of the same rows."""
    param, state = nn.Parameter(rows.p.clone()), {"exp_avg": rows.m.clone(), "exp_avg_sq": rows.v.clone()}
    if schedule.amsgrad:
        state["max_exp_avg_sq"] = rows.v.clone()
    since = torch.from_numpy(schedule.step - rows.gaps).to(torch.int32)
    module = importlib.import_module(f"rowstep._backends.{backend}")
    Backend(module).catch_up(LateRows(param, state, since, schedule), torch.arange(len(since)))
    assert (since == schedule.step).all()
    if schedule.amsgrad:
        assert torch.equal(state.pop("max_exp_avg_sq"), rows.v)
    return {key: value.detach().double().numpy() for key, value in {"p": param, **state}.items()}


def assert_close(name: str, actual: Any, truth: Any, relative: Any, absolute: Any, largest: float) -> None:
    """Numbers where the truth is one that can be stored, and close to it; no numbers where it is none."""
    with np.errstate(all="ignore"):
        held = np.abs(truth) < 0.9 * largest
        beyond = ~(np.abs(truth) <= 1.1 * largest)
        wrong = held & ~(np.abs(actual - truth) <= relative * np.abs(truth) + absolute)
        wrong |= beyond & np.isfinite(actual)
    where = np.argwhere(wrong)[:4].tolist()
    assert not wrong.any(), f"{name}: {wrong.sum()} wrong, at {where}: {actual[wrong][:4]} for {truth[wrong][:4]}"


def assert_is_dense_adam(backend: str, point: Point, schedule: Schedule, rows: Rows, truth: dict[str, Any]) -> None:
    dtype = rows.p.dtype
    stored, computed = torch.finfo(dtype), torch.finfo(compute_dtype(dtype))
    actual = in_one_stride(backend, schedule, rows)
    # A sum of terms that decay by r rounds as often as there are terms of about the same size.
    rounding = computed.eps * (60 + 2 / (1 - schedule.ratio))
    floor = stored.smallest_normal * stored.eps
    # Beyond the window every move is below 1e-17 of what the first would have been, had there been a learning rate.
    first = RATE * rows.m.double().abs() / (rows.v.double().sqrt() + point.eps * math.sqrt(1 - point.betas[1]))
    cut = 1e-16 / (1 - schedule.ratio) * first.numpy()
    absolute = rounding * rows.p.double().abs().numpy() + cut + floor
    if dtype != torch.float64 and np.float32(point.eps) == 0:
        # Where v is 0 as well nothing is left to divide a momentum by: torch's own float32 is infinite there.
        lost = ((rows.v == 0) & (rows.m != 0)).numpy()
        actual["p"], truth = np.where(lost, 0, actual["p"]), truth | {"p": np.where(lost, 0, truth["p"])}
    largest = min(stored.max, computed.max)
    close = rounding + stored.eps
    assert_close("p", actual["p"], truth["p"], close, absolute, largest)
    dust = max(floor, min(computed.smallest_normal, point.eps * DUST_OF_EPS))
    moments = (("exp_avg", point.betas[0], rows.m, dust), ("exp_avg_sq", point.betas[1], rows.v, floor))
    repeated = 2.0**-53 * rows.gaps[:, None]  # dense Adam rounds at every step
    for key, beta, before, least in moments:
        # A power of beta that has few digits, and dense Adam's own rounding of the last few numbers above 0.
        absolute = SMALLEST * before.double().abs().numpy() + (2 + 1 / (1 - beta)) * least
        assert_close(key, actual[key], truth[key], close + repeated, absolute, largest)


def gaps_of(schedule: Schedule) -> list[int]:
    """Short ones, those around the window, and for a short window the longest there is."""
    window = schedule.window_length
    gaps = {1, 2, 5, 40, max(1, window - 1), window, window + 1}
    if window < 1000:
        gaps.add(2 * window)
    if window < 100 and schedule.eps == EPS[0]:
        gaps.add(schedule.capacity - 1)
    return sorted({min(gap, LONGEST_GAP) for gap in gaps})


@pytest.mark.parametrize("point", points(), ids=str)
def test_a_stride_is_dense_adams(point: Point) -> None:
    check_betas(*point.betas, amsgrad=point.amsgrad)
    schedules = [
        Schedule(point.betas, point.eps, amsgrad=point.amsgrad, step=point.first, tolerance=tolerance)
        for tolerance in (1e-9, 1e-15)
    ]
    gaps = gaps_of(schedules[0])
    last = point.first + 1 + max(gaps)
    for step in range(point.first + 1, last + 1):
        for schedule in schedules:
            schedule.advance(point.lr(step), point.decay)
    for dtype in DTYPES:
        rows = Rows(point, gaps, dtype)
        truth = densely(point, rows, last)
        for backend in ("reference", "numba"):
            assert_is_dense_adam(backend, point, schedules[dtype == torch.float64], rows, truth)

"""One catch-up against dense Adam in float64, over the whole plane of betas and all that meets it there.

A catch-up is held to what its row was when it began to wait, as it was stored: it must end where dense Adam in float64
ends from there, within the rounding of the dtype it is stored in and of the one it is computed in.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import Parameter

from rowstep import DeferredAdamW
from tests.helpers.deferred_cases import LONG, RATE, SCHEDULES
from tests.helpers.gradients import rows_of

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
BACKENDS = ("reference", "numba")
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SMALLEST = 2.0**-1074
# Momentum below this share of eps may be dropped.
DUST_OF_EPS = 1e-24
# Rows of a small table are brought up to date in turn from about 1,200 steps on: after that it is not one catch-up.
# `test_same_as_torch` has rows that wait for longer than momentum acts at the usual betas, 374 steps.
LONGEST_GAP = 1100 if LONG else 120


@dataclass(frozen=True)
class Point:
    """The options of one run. Tables begin to wait at different steps of it, the first at ``first`` + 1."""

    betas: tuple[float, float]
    amsgrad: bool
    eps: float
    decay: float
    rate: str
    first: int
    backends: tuple[str, ...]

    def lr(self, step: int) -> float:
        return SCHEDULES[self.rate](step - self.first)

    @property
    def ratio(self) -> float:
        """By how much the moves of a row without a gradient shrink at each step."""
        beta1, beta2 = self.betas
        return beta1 if self.amsgrad else beta1 / math.sqrt(beta2)

    @property
    def gaps(self) -> list[int]:
        """Short ones, and those around the number of steps after which nothing moves any more."""
        window = 1 if self.ratio == 0 else math.ceil(math.log(1e-17) / math.log(self.ratio))
        return sorted({min(gap, LONGEST_GAP) for gap in (1, 2, 5, 40, max(1, window - 1), window + 1, 2 * window)})


def points() -> list[Point]:
    """Every pair of betas with every eps, and the other options in turn.

    In a short run each pair has two values of eps, one on each backend.
    """
    numbers = random.Random(0)
    plane = [(betas, False) for betas in BETAS + LONG_BETAS * LONG]
    plane += [(betas, True) for betas in AMSGRAD_BETAS + LONG_AMSGRAD_BETAS * LONG]
    found = []
    for place, (betas, amsgrad) in enumerate(plane):
        for turn, eps in enumerate(EPS if LONG else [EPS[place % 2], EPS[2 + place % 5]]):
            rate, first = numbers.choice(list(SCHEDULES)), numbers.choice(FIRST_STEPS)
            backends = BACKENDS if LONG else (BACKENDS[(place // 2 + turn) % 2],)
            found.append(Point(betas, amsgrad, eps, DECAYS[(place + turn) % 3], rate, first, backends))
    return found


class Rows:
    """Rows as one gradient of each size leaves them, as a dtype stores them."""

    def __init__(self, point: Point, dtype: torch.dtype) -> None:
        mixed = torch.tensor([0.0, -1e-30, 1.0, -1e12], dtype=torch.float64)
        signs = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
        g = torch.cat([torch.tensor(SIZES, dtype=torch.float64).unsqueeze(1) * signs, mixed.unsqueeze(0)])
        p = torch.tensor([0.0, 1.0, -3.0, 1e-3], dtype=torch.float64).repeat(len(g), 1)
        beta1, beta2 = point.betas
        self.p, self.m, self.v = (part.to(dtype) for part in (p, (1 - beta1) * g, (1 - beta2) * g.square()))


def densely(point: Point, rows: Rows, last: int, gap: int) -> dict[str, Any]:
    """Dense Adam in float64 without gradients, for the last ``gap`` steps."""
    p, m, v = (part.double().numpy().copy() for part in (rows.p, rows.m, rows.v))
    largest = v.copy()
    beta1, beta2 = point.betas
    with np.errstate(all="ignore"):
        for step in range(last - gap + 1, last + 1):
            p *= 1 - point.lr(step) * point.decay
            m *= beta1
            v *= beta2
            root = np.sqrt(largest if point.amsgrad else v) / math.sqrt(1 - beta2**step)
            p -= point.lr(step) / (1 - beta1**step) * (m / (root + point.eps))
    return {"p": p, "exp_avg": m, "exp_avg_sq": v}


def deferred(point: Point, starts: list[tuple[Rows, int]], last: int) -> list[dict[str, Any]]:
    """What DeferredAdamW makes of tables that each wait for the last ``gap`` steps and then catch up."""
    params = [Parameter(rows.p.clone()) for rows, _ in starts]
    optimizer = DeferredAdamW(
        params, lr=0.0, betas=point.betas, eps=point.eps, weight_decay=point.decay, amsgrad=point.amsgrad
    )
    saved: dict[str, Any] = {"state": {}, "param_groups": optimizer.state_dict()["param_groups"]}
    for number, (rows, gap) in enumerate(starts):
        moments = {"exp_avg": rows.m.clone(), "exp_avg_sq": rows.v.clone()}
        if point.amsgrad:
            moments["max_exp_avg_sq"] = rows.v.clone()
        saved["state"][number] = {"step": torch.tensor(float(last - gap)), **moments}
    optimizer.load_state_dict(saved)
    for step in range(last - max(point.gaps) + 1, last + 1):
        optimizer.param_groups[0]["lr"] = point.lr(step)
        for param, (_, gap) in zip(params, starts, strict=True):
            if step == last - gap + 1:
                param.grad = rows_of(param, [])
        optimizer.step()
    optimizer.flush()
    found = []
    for param, (rows, _) in zip(params, starts, strict=True):
        state = {key: slot for key, slot in optimizer.state[param].items() if key != "step"}
        if point.amsgrad:
            kept = rows.v.isfinite()
            assert torch.equal(state.pop("max_exp_avg_sq")[kept], rows.v[kept])
        found.append({key: value.detach().double().numpy() for key, value in {"p": param, **state}.items()})
    return found


def assert_close(name: str, actual: Any, truth: Any, relative: Any, absolute: Any, largest: float) -> None:
    """Numbers where the truth is one that can be stored, and close to it; no numbers where it is none."""
    with np.errstate(all="ignore"):
        held = np.abs(truth) < 0.9 * largest
        beyond = ~(np.abs(truth) <= 1.1 * largest)
        wrong = held & ~(np.abs(actual - truth) <= relative * np.abs(truth) + absolute)
        wrong |= beyond & np.isfinite(actual)
    where = np.argwhere(wrong)[:4].tolist()
    assert not wrong.any(), f"{name}: {wrong.sum()} wrong, at {where}: {actual[wrong][:4]} for {truth[wrong][:4]}"


def assert_is_dense_adam(point: Point, rows: Rows, gap: int, actual: dict[str, Any], truth: dict[str, Any]) -> None:
    dtype = rows.p.dtype
    stored, computed = torch.finfo(dtype), torch.finfo(torch.promote_types(dtype, torch.float32))
    # A sum of terms that decay by r rounds as often as there are terms of about the same size.
    rounding = computed.eps * (60 + 2 / (1 - point.ratio))
    floor = stored.smallest_normal * stored.eps
    # Beyond the window every move is below 1e-17 of what the first would have been, had there been a learning rate.
    first = RATE * rows.m.double().abs() / (rows.v.double().sqrt() + point.eps * math.sqrt(1 - point.betas[1]))
    cut = 1e-16 / (1 - point.ratio) * first.numpy()
    # A move this small is itself rounded, and then stored; and so is each of the terms that it is the sum of.
    absolute = rounding * rows.p.double().abs().numpy() + cut + (2 + 0.5 / (1 - point.ratio)) * floor
    lost = torch.zeros_like(rows.v, dtype=torch.bool)
    if dtype != torch.float64 and np.float32(point.eps) == 0:
        # Where v is 0 as well nothing is left to divide a momentum by: torch's own float32 is infinite there.
        lost |= (rows.v == 0) & (rows.m != 0)
    if dtype != torch.float64 and point.amsgrad and np.float32(point.betas[1]) == 0:
        lost |= rows.v.isinf()  # 0 times infinity is NaN, and so is the maximum then: in torch's float32 too
    actual, truth = (one | {"p": np.where(lost.numpy(), 0, one["p"])} for one in (actual, truth))
    absolute = np.where(lost.numpy(), 0, absolute)
    largest = min(stored.max, computed.max)
    close = rounding + stored.eps
    assert_close("p", actual["p"], truth["p"], close, absolute, largest)
    dust = max(floor, min(computed.smallest_normal, point.eps * DUST_OF_EPS))
    moments = (("exp_avg", point.betas[0], rows.m, dust), ("exp_avg_sq", point.betas[1], rows.v, floor))
    for key, beta, before, least in moments:
        # A power of beta that has few digits, and dense Adam's own rounding of the last few numbers above 0.
        absolute = SMALLEST * before.double().abs().numpy() + (2 + 1 / (1 - beta)) * least
        assert_close(key, actual[key], truth[key], close + 2.0**-53 * gap, absolute, largest)


@pytest.mark.parametrize("point", points(), ids=str)
def test_a_catch_up_is_dense_adams(point: Point, monkeypatch: pytest.MonkeyPatch) -> None:
    starts = [(Rows(point, dtype), gap) for dtype in DTYPES for gap in point.gaps]
    last = point.first + 1 + max(point.gaps)
    truths = [densely(point, rows, last, gap) for rows, gap in starts]
    for backend in point.backends:
        monkeypatch.setenv("ROWSTEP_BACKEND", backend)
        for (rows, gap), found, truth in zip(starts, deferred(point, starts, last), truths, strict=True):
            assert_is_dense_adam(point, rows, gap, found, truth)

"""A million steps: nothing grows, and the end is where the equations lead.

Gradients do not depend on the weights here, so what each side computes can be compared at the end of any run.
``ROWSTEP_LONG=1`` runs it, and ``-s`` shows how long steps take from the first to the last.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from rowstep import DeferredAdamW, SparseAdam
from tests.helpers.deferred_cases import only_long

STEPS, CHUNK = 1_000_000, 100_000
ROWS, COLUMNS = 30, 4
RATE, EPS, DECAY = 1e-3, 1e-8, 1e-3

Betas = tuple[float, float]

# How far a float64 run may end from the equations, with weights of about 1, where one rounding is 1e-16.
BAR = 1e-11

Array = npt.NDArray[Any]


def in_turn(steps: range) -> Array:
    """Every row once in ROWS steps."""
    return np.arange(steps.start, steps.stop) % ROWS


def mostly_few(steps: range) -> Array:
    """Four rows in turn, and every 4,000 steps one of the others: those wait for 104,000, six times round the ring."""
    numbers = np.arange(steps.start, steps.stop)
    return np.where(numbers % 4000 == 0, 4 + numbers // 4000 % (ROWS - 4), numbers % 4)


def gradients(steps: range) -> Array:
    """The gradient of the one row that a step touches: never the same, of sizes from 1e-3 to 1."""
    numbers = np.arange(steps.start, steps.stop, dtype=np.float64)[:, None]
    return np.sin(numbers * 0.37 + np.arange(COLUMNS)) * 10 ** (-1.5 + 1.5 * np.cos(numbers * 1e-4))


def chunks() -> Iterator[range]:
    return (range(start, start + CHUNK) for start in range(0, STEPS, CHUNK))


def start() -> Tensor:
    torch.manual_seed(0)
    return torch.rand(ROWS, COLUMNS, dtype=torch.float64)


class Watch:
    """What a process holds at the end of each chunk of steps, and how long a step has taken."""

    def __init__(self) -> None:
        self._resident: list[int] = []
        self._objects: list[int] = []
        self._clock = time.perf_counter()
        self._spent: list[float] = []

    def note(self) -> None:
        self._spent.append((time.perf_counter() - self._clock) / CHUNK * 1e6)
        gc.collect()
        self._objects.append(len(gc.get_objects()))
        self._resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096)
        self._clock = time.perf_counter()

    def assert_flat(self, name: str) -> None:
        print(f"{name}: µs a step {[round(spent, 1) for spent in self._spent]}, {self._resident[-1] >> 20} MiB")
        # What a step leaves behind once, it has left by the end of the second chunk. A number a step would be 24 MiB;
        # the allocator's own ups and downs, over arrays of a chunk's gradients, were 5 MiB.
        assert self._resident[-1] - self._resident[1] < 12 << 20
        assert self._objects[-1] - self._objects[1] < 1000


def run(optimizer: Any, param: Parameter, touched: Any, watch: Watch) -> None:
    """All steps: of each, one row has a gradient."""
    ids = [torch.tensor([row]) for row in range(ROWS)]
    blank = torch.zeros(1, COLUMNS, dtype=param.dtype)
    grads = [torch.sparse_coo_tensor(row[None], blank, param.shape, check_invariants=False) for row in ids]
    values = [grad._values() for grad in grads]
    catch_up = getattr(optimizer, "catch_up", lambda param, ids: None)
    for steps in chunks():
        numbers = torch.from_numpy(gradients(steps)).to(param.dtype).unsqueeze(1)
        for number, row in enumerate(touched(steps).tolist()):
            catch_up(param, ids[row])
            values[row].copy_(numbers[number])
            param.grad = grads[row]
            optimizer.step()
        watch.note()


# Under the second pair momentum acts for about 110 steps and not for 374, so the window to rebuild is shorter.
BOTH = pytest.mark.parametrize(("dtype", "betas"), [(torch.float64, (0.9, 0.999)), (torch.float32, (0.7, 0.99))])


@only_long
@BOTH
def test_a_million_steps_of_sparse_adam(dtype: torch.dtype, betas: Betas, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROWSTEP_BACKEND", "numba")
    param, watch = Parameter(start().to(dtype)), Watch()
    optimizer = SparseAdam([param], lr=RATE, betas=betas, eps=EPS)
    run(optimizer, param, in_turn, watch)
    watch.assert_flat(f"SparseAdam {dtype}")
    assert optimizer.state[param]["step"] == STEPS
    truth, rounded = (rows_in_turn(start().to(each).numpy(), betas) for each in (torch.float64, dtype))
    assert_as_good_as(param, truth, rounded)


def rows_in_turn(p: Array, betas: Betas) -> Array:
    """The rule of SparseAdam for all rows at once, since each of them is touched once in ROWS steps."""
    m, v, p = np.zeros_like(p), np.zeros_like(p), p.copy()
    for steps in (range(first, min(first + ROWS, STEPS)) for first in range(0, STEPS, ROWS)):
        counts, g = np.arange(steps.start, steps.stop)[:, None] + 1.0, gradients(steps).astype(p.dtype)
        some = slice(len(steps))
        m[some] += (g - m[some]) * p.dtype.type(1 - betas[0])
        v[some] += (g * g - v[some]) * p.dtype.type(1 - betas[1])
        size = RATE * np.sqrt(1 - betas[1] ** counts) / (1 - betas[0] ** counts)
        p[some] -= size.astype(p.dtype) * (m[some] / (np.sqrt(v[some]) + p.dtype.type(EPS)))
    return p


@only_long
@BOTH
def test_a_million_deferred_steps(dtype: torch.dtype, betas: Betas, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROWSTEP_BACKEND", "numba")
    param, watch = Parameter(start().to(dtype)), Watch()
    optimizer = DeferredAdamW([param], lr=RATE, betas=betas, eps=EPS, weight_decay=DECAY)
    run(optimizer, param, mostly_few, watch)
    watch.assert_flat(f"DeferredAdamW {dtype}")
    optimizer.flush()
    assert optimizer.state[param]["step"].item() == STEPS
    truth, rounded = (all_rows(start().to(each).numpy(), betas) for each in (torch.float64, dtype))
    assert_as_good_as(param, truth, rounded)


def all_rows(p: Array, betas: Betas) -> Array:
    """Dense AdamW: every step moves every row."""
    m, v, g, p = np.zeros_like(p), np.zeros_like(p), np.zeros_like(p), p.copy()
    kind = p.dtype.type
    for steps in chunks():
        values, rows = gradients(steps).astype(p.dtype), mostly_few(steps)
        counts = np.arange(steps.start, steps.stop) + 1.0
        roots = np.sqrt(1 - betas[1] ** counts)
        sizes = (RATE * roots / (1 - betas[0] ** counts)).astype(p.dtype)
        added = (EPS * roots).astype(p.dtype)
        for number, row in enumerate(rows):
            p *= kind(1 - RATE * DECAY)
            g[row] = values[number]
            m += (g - m) * kind(1 - betas[0])
            v += (g * g - v) * kind(1 - betas[1])
            p -= sizes[number] * (m / (np.sqrt(v) + added[number]))
            g[row] = 0
    return p


def assert_as_good_as(param: Tensor, truth: Array, rounded: Array) -> None:
    """In float64 the truth itself; in float32 at most as far from it as the same equations in float32."""
    error = param.detach().double().numpy() - truth
    if param.dtype == torch.float64:
        assert np.abs(error).max() < BAR, np.abs(error).max()
        return
    rms, usual = (float(np.sqrt(np.mean(each**2))) for each in (error, rounded - truth))
    print(f"rms from the truth {rms:.2g}, of the equations in float32 {usual:.2g}")
    assert rms <= 1.1 * usual

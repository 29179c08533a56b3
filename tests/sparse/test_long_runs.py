"""A million steps: nothing grows, and the end is where the equations lead.

Gradients do not depend on the weights here, so what each side computes can be compared at the end of any run.
``ROWSTEP_LONG=1`` runs it.
"""

from __future__ import annotations

import gc
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
CHUNKS = [range(start, start + CHUNK) for start in range(0, STEPS, CHUNK)]
ROWS, COLUMNS = 30, 4
RATE, EPS = 1e-3, 1e-8

# How far a float64 run may end from the equations, with weights of about 1, where one rounding is 1e-16.
BAR = 1e-11

Array = npt.NDArray[Any]


def touched(steps: range) -> Array:
    """Four rows in turn, and every 4,000 steps one of the others: those wait for 104,000, six times round the ring."""
    numbers = np.arange(steps.start, steps.stop)
    return np.where(numbers % 4000 == 0, 4 + numbers // 4000 % (ROWS - 4), numbers % 4)


def gradients(steps: range) -> Array:
    """The gradient of the one row that a step touches: never the same, of sizes from 1e-3 to 1."""
    numbers = np.arange(steps.start, steps.stop, dtype=np.float64)[:, None]
    return np.sin(numbers * 0.37 + np.arange(COLUMNS)) * 10 ** (-1.5 + 1.5 * np.cos(numbers * 1e-4))


def start() -> Tensor:
    torch.manual_seed(0)
    return torch.rand(ROWS, COLUMNS, dtype=torch.float64)


def run(optimizer: Any, param: Parameter) -> None:
    """All steps: of each, one row has a gradient."""
    ids = [torch.tensor([row]) for row in range(ROWS)]
    blank = torch.zeros(1, COLUMNS, dtype=param.dtype)
    grads = [torch.sparse_coo_tensor(row[None], blank, param.shape, check_invariants=False) for row in ids]
    values = [grad._values() for grad in grads]
    catch_up = getattr(optimizer, "catch_up", lambda param, ids: None)
    held = []
    for steps in CHUNKS:
        numbers = torch.from_numpy(gradients(steps)).to(param.dtype).unsqueeze(1)
        for number, row in enumerate(touched(steps).tolist()):
            catch_up(param, ids[row])
            values[row].copy_(numbers[number])
            param.grad = grads[row]
            optimizer.step()
        gc.collect()
        held.append((int(Path("/proc/self/statm").read_text().split()[1]) * 4096, len(gc.get_objects())))
    # What a step leaves behind once, it has left by the end of the second chunk. A number a step would be 24 MiB; the
    # allocator's own ups and downs, over arrays of a chunk's gradients, were 5 MiB.
    assert held[-1][0] - held[1][0] < 12 << 20
    assert held[-1][1] - held[1][1] < 1000


def equations(p: Array, betas: tuple[float, float], *, decay: float, is_dense: bool) -> Array:
    """Dense AdamW, where every step moves every row, or SparseAdam, where it moves one, with its own place of eps."""
    p = p.copy()
    m, v = np.zeros_like(p), np.zeros_like(p)
    for steps in CHUNKS:
        counts = np.arange(steps.start, steps.stop) + 1.0
        roots = np.sqrt(1 - betas[1] ** counts)
        sizes = RATE * roots / (1 - betas[0] ** counts)
        added = EPS * (roots if is_dense else np.ones_like(roots))
        for number, (row, g) in enumerate(zip(touched(steps), gradients(steps), strict=True)):
            moved = slice(None) if is_dense else slice(row, row + 1)
            full = np.zeros_like(p)
            full[row] = g
            p[moved] *= 1 - RATE * decay
            m[moved] += (full[moved] - m[moved]) * (1 - betas[0])
            v[moved] += (full[moved] ** 2 - v[moved]) * (1 - betas[1])
            p[moved] -= sizes[number] * (m[moved] / (np.sqrt(v[moved]) + added[number]))
    return p


@only_long
# Under the second pair momentum acts for about 110 steps and not for 374, so the window to rebuild is shorter.
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.7, 0.99)])
@pytest.mark.parametrize(("kind", "decay"), [(SparseAdam, 0.0), (DeferredAdamW, 1e-3)])
def test_a_million_steps(kind: Any, decay: float, betas: tuple[float, float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROWSTEP_BACKEND", "numba")
    param = Parameter(start())
    optimizer = kind([param], lr=RATE, betas=betas, eps=EPS, weight_decay=decay)
    run(optimizer, param)
    assert int(optimizer.state_dict()["state"][0]["step"]) == STEPS
    truth = equations(start().numpy(), betas, decay=decay, is_dense=kind is DeferredAdamW)
    assert np.abs(param.detach().numpy() - truth).max() < BAR

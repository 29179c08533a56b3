"""Below float64: a run is not farther from the float64 truth than torch's own dense run of the same dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.deferred_cases import LONG, embedding, optimizers, rms, zipf

pytestmark = pytest.mark.usefixtures("backend")


def distances(dtype: torch.dtype, steps: int, scale: float, **options: Any) -> dict[str, tuple[float, float]]:
    """How far the reads, and the flushed table, are from a dense float64 run: ours, and torch's own in ``dtype``."""
    rows = 300
    start = torch.randn(rows, 4, dtype=torch.float64).to(dtype)
    ours, dense = embedding(rows, 4, dtype=dtype), nn.Embedding(rows, 4, dtype=dtype)
    truth = nn.Embedding(rows, 4, dtype=torch.float64)
    for model in (ours, dense, truth):
        model.load_state_dict({"weight": start})
    optimizer, exact = optimizers(ours, truth, **options)
    _, theirs = optimizers([embedding(1, 1).weight], dense, **options)
    far: dict[str, list[float]] = {"ours": [], "theirs": []}
    for _ in range(steps):
        ids, goal = zipf(rows, 12), torch.randn(12, 4, dtype=torch.float64)
        reads = []
        for model, one in ((truth, exact), (ours, optimizer), (dense, theirs)):
            one.zero_grad()
            reads.append(model(ids))
            torch.autograd.backward(scale * (reads[-1].double() - goal).square().mean())
            one.step()
        far["ours"].append(rms(reads[1], reads[0]) ** 2)
        far["theirs"].append(rms(reads[2], reads[0]) ** 2)
    optimizer.flush()
    return {
        "reads": ((sum(far["ours"]) / steps) ** 0.5, (sum(far["theirs"]) / steps) ** 0.5),
        "table": (rms(ours.weight, truth.weight), rms(dense.weight, truth.weight)),
    }


@pytest.mark.parametrize(("scale", "options"), [(1.0, {}), (1e-6, {"weight_decay": 0.1})], ids=str)
def test_float32_is_closer_to_the_truth_than_torchs_own(backend: str, scale: float, options: dict[str, Any]) -> None:
    steps = 3000 if LONG else 450 if backend == "numba" else 150
    found = distances(torch.float32, steps, scale, lr=1e-3, **options)
    assert found["reads"][0] <= found["reads"][1] < 1e-4
    assert found["table"][0] <= found["table"][1] < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bits_run_and_stay_close(backend: str, dtype: torch.dtype) -> None:
    """The moments have the parameter's dtype, as torch's; the loss is scaled so that float16 can hold their squares."""
    found = distances(dtype, 400 if backend == "numba" and dtype == torch.bfloat16 else 100, 100.0, lr=0.01, eps=1e-4)
    assert found["reads"][0] <= found["reads"][1]
    assert found["table"][0] <= found["table"][1]
    assert max(found["reads"][0], found["table"][0]) < 0.05

"""What every training on MovieLens shares: its tables, its loop, and what the loop costs.

Costs are processor time, which a busy machine distorts less than the clock; a training runs on one thread, so on an
idle machine the two are the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from benchmarks.quality.tuning import falling_rate

FIRST_WEIGHTS = 0.03  # their standard deviation in the tables

STEP, TRAINING = "milliseconds_per_step_of_tables", "seconds_of_training"


def table(rows: int, dim: int, *, dense: bool) -> nn.Embedding:
    """``dense`` is the kind of its gradient."""
    return nn.Embedding(rows, dim, sparse=not dense, _weight=FIRST_WEIGHTS * torch.randn(rows, dim))


def fit(
    model: nn.Module,
    loss: Callable[[Tensor], Tensor],
    batches: Sequence[Tensor],
    of_tables: torch.optim.Optimizer,
    *others: torch.optim.Optimizer,
) -> dict[str, float]:
    """Train once through all batches, with rates that fall to 0, and return what that cost."""
    falling = zip(*(falling_rate(optimizer, len(batches)) for optimizer in (of_tables, *others)), strict=True)
    stepping, start = 0.0, time.process_time()
    for batch, _ in zip(batches, falling, strict=True):
        model.zero_grad()
        loss(batch).backward()  # type: ignore[no-untyped-call]
        before = time.process_time()
        of_tables.step()
        stepping += time.process_time() - before
        for optimizer in others:
            optimizer.step()
    return {STEP: 1e3 * stepping / len(batches), TRAINING: time.process_time() - start}

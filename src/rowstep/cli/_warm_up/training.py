"""A training of a few steps that needs every kernel which a usual program needs."""

from __future__ import annotations

import torch
from torch import nn

import rowstep
from rowstep._kernels.workspace import PARALLEL_FROM_BYTES

COLUMNS = 64
STEPS = 3  # from the second on, rows have waited and catch up


def run(name: str, dtype: torch.dtype) -> None:
    """Train a table of this dtype with this optimizer, on one thread and on two."""
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            _train(name, dtype)
    finally:
        torch.set_num_threads(before)


def _train(name: str, dtype: torch.dtype) -> None:
    # A gradient that is large enough for threads, over a table of which a part waits.
    ids = 2 * PARALLEL_FROM_BYTES // (COLUMNS * dtype.itemsize)
    table = nn.Embedding(2 * ids, COLUMNS, sparse=True, dtype=dtype)
    optimizer: torch.optim.Optimizer = getattr(rowstep, name)(table.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        torch.autograd.backward(table(torch.arange(ids) + step).float().sum())
        rowstep.clip_grad_norm_(table.parameters(), 1.0)
        optimizer.step()
    optimizer.state_dict()  # every row catches up

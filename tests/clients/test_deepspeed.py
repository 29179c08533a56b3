"""DeepSpeed's ``sparse_gradients``: https://github.com/deepspeedai/DeepSpeed, deepspeed/runtime/engine.py.

Each rank divides its gradient's values by the number of ranks. Ids and values are then gathered from all ranks, filled
up to the longest and cut again, and a gradient is rebuilt of them all. A row that two ranks have read is in it twice.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rowstep import DeferredAdam, SparseAdam, StaleRowsError
from tests.clients.side_by_side import REPORT, Seen, assert_same_as_adam, assert_same_bits, assert_same_run
from tests.helpers.ranks import Ranks
from tests.helpers.ratings import TorchsTwo

RANKS, ROWS, WIDTH = 2, 100, 6


class Model(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH, sparse=sparse)
        self.layer = nn.Linear(WIDTH, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.layer(self.table(ids).tanh()).squeeze(-1)


def gather(mine: Tensor) -> Tensor:
    """The rows of all ranks, which may have different numbers of them."""
    sizes = [torch.zeros(1, dtype=torch.long) for _ in range(RANKS)]
    dist.all_gather(sizes, torch.tensor([len(mine)]))
    longest = int(max(sizes))
    filled = torch.cat([mine, mine.new_empty(longest - len(mine), *mine.shape[1:])])
    received = [torch.empty_like(filled) for _ in range(RANKS)]
    dist.all_gather(received, filled)
    return torch.cat([rows[: int(size)] for rows, size in zip(received, sizes, strict=True)])


def average_gradients(model: nn.Module) -> None:
    for param in model.parameters():
        assert param.grad is not None
        if param.grad.is_sparse:
            grad = param.grad.coalesce()
            ids, values = gather(grad.indices()[0]), gather(grad.values() / RANKS)
            param.grad.data = torch.sparse_coo_tensor(ids[None], values, param.shape, check_invariants=True)
        else:
            dist.all_reduce(param.grad)
            param.grad /= RANKS


def train(make: Any, sparse: bool, seen: Seen, dtype: torch.dtype = torch.float64) -> None:
    model = Model(sparse).to(dtype)
    optimizer = make(model)
    random = torch.Generator().manual_seed(dist.get_rank())
    data = [torch.randint(ROWS, (8 + 3 * dist.get_rank(),), generator=random) for _ in range(5)]
    for _ in range(7):
        for ids in data:
            optimizer.zero_grad()
            loss = (model(ids) - ids.to(dtype).sin()).square().mean()
            loss.backward()
            average_gradients(model)
            optimizer.step()
            seen.after_step(loss.detach(), model, optimizer)


def one_optimizer(model: Model) -> SparseAdam:
    return SparseAdam(model.parameters(), lr=0.02)


def adam(model: Model) -> torch.optim.Adam:
    return torch.optim.Adam(model.parameters(), lr=0.02)


def deferred(model: Model) -> DeferredAdam:
    """Another rank's rows have not been read here, so that they may wait still. They catch up in the step."""
    return DeferredAdam(model, lr=0.02, allow_stale=True)


def sparse_adam_on_rank(rank: int) -> list[str]:
    in_float32, theirs = partial(train, dtype=torch.float32), partial(TorchsTwo, lr=0.02)
    return [
        assert_same_run("DeepSpeed, SparseAdam", train, theirs, one_optimizer),
        assert_same_bits("DeepSpeed, SparseAdam in float32", in_float32, theirs, one_optimizer, {"table.weight"}),
    ]


def deferred_adam_on_rank(rank: int) -> list[str]:
    with pytest.raises(StaleRowsError):  # it does not know of the other ranks
        train(lambda model: DeferredAdam(model, lr=0.02), True, Seen(every=100))
    return assert_same_as_adam("DeepSpeed, DeferredAdam", train, deferred, adam)


@pytest.mark.parametrize("program", [sparse_adam_on_rank, deferred_adam_on_rank])
def test_deepspeed(ranks: Ranks, program: Callable[[int], list[str]]) -> None:
    REPORT.extend(ranks.run(RANKS, program)[0])

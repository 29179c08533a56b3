"""The ways to train a table on several ranks that are timed against each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # as torch's own documents have it
from torch.nn.parallel import DistributedDataParallel

from benchmarks import cases
from benchmarks.cases import Case
from rowstep import DeferredAdam, SparseAdam
from rowstep.distributed import ShardedEmbedding, ddp

SHARDED, DEFERRED = "sharded, SparseAdam", "sharded, DeferredAdam"
TORCH_DDP, OUR_DDP = "torch DDP, torch SparseAdam", "rowstep ddp, SparseAdam"
DENSE_DDP = "torch DDP, torch Adam (dense)"  # not timed: it is what DeferredAdam must agree with

BAG, OUTPUTS = 8, 16  # ids per example, and what the dense layer makes of their sum


class Model(nn.Module):
    """A table with a small dense layer on top; gives the loss."""

    def __init__(self, table: nn.Module, width: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table, self.top = table, nn.Linear(width, OUTPUTS)

    def forward(self, ids: Tensor) -> Tensor:
        rows: Tensor = self.table(ids)
        guesses = self.top(rows.view(-1, BAG, rows.shape[-1]).sum(1))
        # Nothing to learn, so that gradients stay as large as in training: where they vanish, DeferredAdam is slower.
        labels = (ids.view(-1, BAG)[:, :1] + torch.arange(OUTPUTS)) % 2
        return F.binary_cross_entropy_with_logits(guesses, labels.to(rows.dtype), reduction="sum") / len(labels)


class Trainer:
    """One way, on this rank."""

    def __init__(self, model: Any, optimizers: Sequence[torch.optim.Optimizer], turn: Iterator[Tensor]) -> None:
        self.model, self.optimizers, self._turn = model, optimizers, turn
        self.phases: list[Callable[[], None]] = [self._forward, self._backward, self._step]

    def step(self) -> None:
        for phase in self.phases:
            phase()

    def _forward(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self._loss = self.model(next(self._turn))

    def _backward(self) -> None:
        self._loss.backward()

    def _step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def weights(self) -> Tensor:
        """The whole table, by id. All ranks call this together."""
        table = self.model.module.table
        if isinstance(table, ShardedEmbedding):
            return table.full_weight()
        weight: Tensor = table.weight.detach()
        return weight


def trainer(way: str, case: Case, turn: Iterator[Tensor]) -> Trainer:
    weight = cases.parameters(case)[0].detach()
    embedding = nn.Embedding(case.rows, case.dim, sparse=way != DENSE_DDP, _weight=weight)
    table = ShardedEmbedding.from_embedding(embedding) if way in (SHARDED, DEFERRED) else embedding
    plain = Model(table, case.dim)
    # Every rank uses everything in every step, and torch's default is to count on that.
    wrap = DistributedDataParallel if way in (TORCH_DDP, DENSE_DDP) else ddp
    model = wrap(plain, find_unused_parameters=False)
    optimizers: list[torch.optim.Optimizer]
    if way == TORCH_DDP:  # torch's SparseAdam takes no dense gradients
        optimizers = [torch.optim.SparseAdam([embedding.weight]), torch.optim.Adam(plain.top.parameters())]
    elif way == DENSE_DDP:
        optimizers = [torch.optim.Adam(plain.parameters(), fused=True)]
    elif way == DEFERRED:
        optimizers = [DeferredAdam(plain)]
    else:
        optimizers = [SparseAdam(plain.parameters())]
    return Trainer(model, optimizers, turn)

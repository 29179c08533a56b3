"""The time of a training step of many tables: sharded and looked up together, or whole on every rank under DDP."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # as torch's own documents have it
from torch.nn.parallel import DistributedDataParallel

from benchmarks import cases
from benchmarks.cases import Case
from benchmarks.contenders import touch_state
from benchmarks.distributed.timings import AGREEING_STEPS, check, difference, other_pids, slowest, take_turns
from benchmarks.distributed.training import OUTPUTS, TORCH_DDP, Trainer
from benchmarks.load import watch
from benchmarks.timing import Measurement, no_garbage_collection
from rowstep import SparseAdam
from rowstep.distributed import ShardedEmbeddingCollection, ddp
from tests.helpers.ranks import Ranks

TOGETHER = "collection, SparseAdam"
WAYS = (TOGETHER, TORCH_DDP)


class Model(nn.Module):
    """Tables with a small dense layer on top; gives the loss."""

    def __init__(self, tables: nn.Module, width: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.tables, self.top = tables, nn.Linear(width, OUTPUTS)

    def forward(self, ids: Mapping[str, Tensor]) -> Tensor:
        # Side by side, not added: torch's DDP divides a gradient that several tables share several times.
        guesses = self.top(torch.cat(self._rows(ids), dim=1))
        labels = (next(iter(ids.values()))[:, None] + torch.arange(OUTPUTS)) % 2
        return F.binary_cross_entropy_with_logits(guesses, labels.to(guesses.dtype), reduction="sum") / len(labels)

    def _rows(self, ids: Mapping[str, Tensor]) -> list[Tensor]:
        if isinstance(self.tables, ShardedEmbeddingCollection):
            return list(self.tables(ids).values())
        return [self.tables.get_submodule(name)(each) for name, each in ids.items()]


class ManyTrainer(Trainer):
    def weights(self) -> Tensor:
        """Of all tables, one after the other. All ranks call this together."""
        tables: Any = self.model.module.tables
        if isinstance(tables, ShardedEmbeddingCollection):
            return torch.cat([tables[name].full_weight() for name in tables])
        return torch.cat([table.weight.detach() for table in tables.values()])


@dataclass(frozen=True)
class OnRank:
    difference: tuple[float, float]  # the largest, and the mean
    seconds: dict[str, list[float]]
    others: float


def steps(ranks: Ranks, count: int, case: Case, repeats: int) -> Measurement:
    on_ranks: list[OnRank] = ranks.run(count, _on_rank, count, case, repeats)
    about = f"{case.about} each, {count} ranks"
    for found in on_ranks:
        check(about, TOGETHER, TORCH_DDP, found.difference)
    timings = slowest([found.seconds for found in on_ranks])
    return Measurement("whole step", f"{case.name}-{count}", about, 1, timings, {}, on_ranks[0].others)


def _on_rank(rank: int, ranks: int, case: Case, repeats: int) -> OnRank:
    names = [f"table {number}" for number in range(case.tables)]
    batches = cases.batches_of_ids(case, ranks * cases.POOL)[rank::ranks]
    pool = [dict(zip(names, ids, strict=True)) for ids in batches]
    trainers = {way: _trainer(way, case, itertools.cycle(pool)) for way in WAYS}
    for begun in trainers.values():
        for _ in range(AGREEING_STEPS):
            begun.step()
    off = difference(trainers[TOGETHER], trainers[TORCH_DDP])
    for optimizer in (optimizer for begun in trainers.values() for optimizer in begun.optimizers):
        touch_state(optimizer)
    with watch(other_pids(rank, ranks)) as load, no_garbage_collection():
        seconds = take_turns(trainers, repeats)
    return OnRank(off, seconds, load.others)


def _trainer(way: str, case: Case, turn: Iterator[Any]) -> ManyTrainer:
    generator = torch.Generator().manual_seed(1)
    plain = {
        f"table {number}": nn.Embedding(
            case.rows, case.dim, sparse=True, _weight=torch.randn(case.rows, case.dim, generator=generator)
        )
        for number in range(case.tables)
    }
    width = case.tables * case.dim
    if way == TOGETHER:
        model = Model(ShardedEmbeddingCollection(plain), width)
        return ManyTrainer(ddp(model, find_unused_parameters=False), [SparseAdam(model.parameters())], turn)
    model = Model(nn.ModuleDict(plain), width)
    weights = [table.weight for table in plain.values()]
    optimizers = [torch.optim.SparseAdam(weights), torch.optim.Adam(model.top.parameters())]
    return ManyTrainer(DistributedDataParallel(model, find_unused_parameters=False), optimizers, turn)

"""The time of a training step at several numbers of ranks, and where the step of a sharded table spends it.

The ways to train that are timed against each other must come to the same weights first.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # as torch's own documents have it
from torch.nn.parallel import DistributedDataParallel

from benchmarks import cases
from benchmarks.cases import Case
from benchmarks.contenders import DisagreementError, touch_state
from benchmarks.timing import Measurement, Timing, no_garbage_collection, watch
from rowstep import DeferredAdam, SparseAdam
from rowstep.distributed import ShardedEmbedding, ShardedEmbeddingCollection, ddp
from tests.helpers.ranks import Ranks

SHARDED, DEFERRED = "sharded, SparseAdam", "sharded, DeferredAdam"
TORCH_DDP, OUR_DDP = "torch DDP, torch SparseAdam", "rowstep ddp, SparseAdam"
DENSE_DDP = "torch DDP, torch Adam (dense)"  # not timed: it is what DeferredAdam must agree with
WAYS = (SHARDED, DEFERRED, TORCH_DDP, OUR_DDP)
MODELS = {SHARDED: TORCH_DDP, OUR_DDP: TORCH_DDP, DEFERRED: DENSE_DDP}  # what each must agree with

AGREEING_STEPS = 3
# A tenth of a step. Where the sum of a frequent row's gradients all but cancels, its rounding decides the direction.
LARGEST_DIFFERENCE = 1e-4
LARGEST_MEAN_DIFFERENCE = 1e-8

BAG, OUTPUTS = 8, 16  # ids per example if there is one table, and what the dense layer makes of their sum
STAGES = SENDING, *PHASES = ("sending, and waiting", "rest of forward", "rest of backward", "optimizer")


class Model(nn.Module):
    """Tables with a small dense layer on top; gives the loss."""

    def __init__(self, tables: Any, case: Case) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.tables, self.top = tables, nn.Linear(case.tables * case.dim, OUTPUTS)
        self.bag = BAG if case.tables == 1 else 1

    def forward(self, ids: Mapping[str, Tensor]) -> Tensor:
        if isinstance(self.tables, ShardedEmbeddingCollection):
            rows = list(self.tables(ids).values())
        else:
            rows = [self.tables[name](each) for name, each in ids.items()]
        # Side by side, not added: torch's DDP divides a gradient that several tables share several times.
        joined = torch.cat(rows, dim=1)
        guesses = self.top(joined.view(-1, self.bag, joined.shape[1]).sum(1))
        # Nothing to learn, so that gradients stay as large as in training: where they vanish, DeferredAdam is slower.
        labels = (next(iter(ids.values())).view(-1, self.bag)[:, :1] + torch.arange(OUTPUTS)) % 2
        return F.binary_cross_entropy_with_logits(guesses, labels.to(guesses.dtype), reduction="sum") / len(labels)


class Trainer:
    """One way, on this rank."""

    def __init__(self, way: str, case: Case, pool: Sequence[Mapping[str, Tensor]]) -> None:
        self._turn = itertools.cycle(pool)
        plain = {
            name: nn.Embedding(case.rows, case.dim, sparse=way != DENSE_DDP, _weight=weight.detach())
            for name, weight in zip(pool[0], cases.parameters(case), strict=True)
        }
        model = Model(_tables(way, plain), case)
        # Every rank uses everything in every step, and torch's default is to count on that.
        wrap = DistributedDataParallel if way in (TORCH_DDP, DENSE_DDP) else ddp
        self.model: Any = wrap(model, find_unused_parameters=False)
        self.optimizers = list(_optimizers(way, model))
        self.phases = dict(zip(PHASES, (self._forward, self._backward, self._step), strict=True))

    def step(self) -> None:
        for phase in self.phases.values():
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

    @torch.no_grad()
    def weights(self) -> Tensor:
        """All tables, by id. All ranks call this together."""
        tables: Any = [self.model.module.tables[name] for name in self.model.module.tables]
        return torch.cat([each.full_weight() if isinstance(each, ShardedEmbedding) else each.weight for each in tables])


def _tables(way: str, plain: dict[str, nn.Embedding]) -> nn.Module:
    if way not in (SHARDED, DEFERRED):
        return nn.ModuleDict(plain)
    if len(plain) > 1:
        return ShardedEmbeddingCollection(dict(plain))
    return nn.ModuleDict({name: ShardedEmbedding.from_embedding(table) for name, table in plain.items()})


def _optimizers(way: str, model: Model) -> Iterator[torch.optim.Optimizer]:
    if way == TORCH_DDP:  # torch's SparseAdam takes no dense gradients
        yield torch.optim.SparseAdam(list(model.tables.parameters()))
        yield torch.optim.Adam(model.top.parameters())
    elif way == DENSE_DDP:
        yield torch.optim.Adam(model.parameters(), fused=True)
    else:
        yield DeferredAdam(model) if way == DEFERRED else SparseAdam(model.parameters())


@dataclass(frozen=True)
class OnRank:
    """What one rank answers."""

    differences: dict[str, tuple[float, float]]  # of the weights: the largest, and the mean
    seconds: dict[str, dict[str, list[float]]]  # of the optimizers' step and of the whole loop, by way
    stages: dict[str, dict[str, float]]
    others: float


def steps(ranks: Ranks, count: int, case: Case, repeats: int) -> tuple[list[Measurement], list[dict[str, Any]]]:
    """Ranks share one batch: any number of them does the same work. A turn takes as long as the slowest rank's."""
    on_ranks: list[OnRank] = ranks.run(count, _on_rank, count, case, repeats)
    about = f"{case.about}, {count} rank{'s' * (count > 1)}"
    for way, (largest, mean) in (pair for found in on_ranks for pair in found.differences.items()):
        if not (largest <= LARGEST_DIFFERENCE and mean <= LARGEST_MEAN_DIFFERENCE):
            raise DisagreementError(
                f"{about}: weights of {way!r} differ from those of {MODELS[way]!r} by up to {largest:.2e}, "
                f"on average {mean:.2e}; their times cannot be compared"
            )
    measured = []
    for kind, of_ways in on_ranks[0].seconds.items():
        turns = {way: zip(*(found.seconds[kind][way] for found in on_ranks), strict=True) for way in of_ways}
        timings = {way: Timing.of([max(each) for each in taken]) for way, taken in turns.items()}
        measured.append(Measurement(kind, f"{case.name}-{count}", about, 1, timings, {}, on_ranks[0].others))
    stages = [
        {
            "about": about,
            "way": way,
            "stages": {name: 1e3 * statistics.mean(found.stages[way][name] for found in on_ranks) for name in STAGES},
        }
        for way in on_ranks[0].stages
    ]
    return measured, stages


def _on_rank(rank: int, ranks: int, case: Case, repeats: int) -> OnRank:
    share = slice(rank * case.ids // ranks, (rank + 1) * case.ids // ranks)
    pool = [{f"table {n}": ids[share] for n, ids in enumerate(batch)} for batch in cases.batches_of_ids(case)]
    trainers = {way: Trainer(way, case, pool) for way in (*WAYS, DENSE_DDP)}
    for trainer in trainers.values():
        for _ in range(AGREEING_STEPS):
            trainer.step()
    differences = {way: _difference(trainers[way], trainers[model]) for way, model in MODELS.items()}
    del trainers[DENSE_DDP]
    for trainer in trainers.values():
        for optimizer in trainer.optimizers:
            touch_state(optimizer)
    for _ in range(case.batches):  # how long a row has waited is nothing to the others
        trainers[DEFERRED].step()
    pids: list[Any] = [None] * ranks
    dist.all_gather_object(pids, os.getpid())
    with watch(pid for pid in pids if pid != os.getpid()) as load, no_garbage_collection():
        seconds = _take_turns(trainers, repeats)
    stages = {way: _stages(trainers[way], repeats) for way in (SHARDED, DEFERRED)}
    return OnRank(differences, seconds, stages, load.others)


def _difference(ours: Trainer, theirs: Trainer) -> tuple[float, float]:
    found = (ours.weights() - theirs.weights()).abs_()
    return found.max().item(), found.mean().item()


def _take_turns(trainers: Mapping[str, Trainer], repeats: int) -> dict[str, dict[str, list[float]]]:
    """All ranks go as many rounds: the time that has passed, which differs among them, must not decide."""
    seconds: dict[str, dict[str, list[float]]] = {kind: {way: [] for way in trainers} for kind in ("step", "loop")}
    for _ in range(repeats):
        for way, trainer in trainers.items():
            dist.barrier()
            *passes, step = trainer.phases.values()
            start = time.perf_counter()
            for each in passes:
                each()
            between = time.perf_counter()
            step()
            end = time.perf_counter()
            seconds["step"][way].append(end - between)
            seconds["loop"][way].append(end - start)
    return seconds


def _stages(trainer: Trainer, repeats: int) -> dict[str, float]:
    """Median seconds of each stage of a step: of all that tables send, and of the rest of its phases."""
    swap, sending = dist.all_to_all_single, 0.0

    def timed_swap(*args: Any, **options: Any) -> Any:
        nonlocal sending
        start = time.perf_counter()
        try:
            return swap(*args, **options)
        finally:
            sending += time.perf_counter() - start

    taken = []
    with mock.patch.object(dist, "all_to_all_single", timed_swap):
        for _ in range(repeats):
            dist.barrier()
            sent_before, stages = sending, {}
            for name, phase in trainer.phases.items():
                sent, start = sending, time.perf_counter()
                phase()
                stages[name] = time.perf_counter() - start - (sending - sent)
            taken.append(stages | {SENDING: sending - sent_before})
    return {name: statistics.median(stages[name] for stages in taken) for name in STAGES}

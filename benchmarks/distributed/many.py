"""The time to look up many tables together, against one table that has all of their rows and all of their ids."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks import cases
from benchmarks.cases import Case
from benchmarks.contenders import DisagreementError
from benchmarks.distributed.timings import other_pids, slowest
from benchmarks.load import watch
from benchmarks.timing import Measurement, Timing, no_garbage_collection
from rowstep.distributed import ShardedEmbedding, ShardedEmbeddingCollection
from tests.helpers.ranks import Ranks

ONE, PLANNED, DIVIDED, APART = "one table", "collection", "collection, divided", "tables apart"
WAYS = (ONE, PLANNED, DIVIDED, APART)
PHASES = FORWARD, BACKWARD, BOTH = "forward", "backward", "forward and backward"
ROUNDS_BEFORE = 2  # untimed: buffers grow, connections open


class Batch:
    """Ids of every table; and the same ids in one table that has the rows of all, one table after the other."""

    def __init__(self, case: Case, ids: Sequence[Tensor]) -> None:
        self.ids = ids
        self.by_name = {f"table {number}": each for number, each in enumerate(ids)}
        self.joint = torch.cat([each + number * case.rows for number, each in enumerate(ids)])


class Way:
    """One way to look up all tables, on this rank."""

    def __init__(self, modules: Sequence[nn.Module], read: Callable[[Batch], list[Tensor]]) -> None:
        self.parameters = [parameter for module in modules for parameter in module.parameters()]
        self.read = read
        self._slopes: list[Tensor] = []

    def turn(self, batch: Batch) -> tuple[float, float]:
        """Seconds of the lookup and of its backward pass, which leaves gradients."""
        dist.barrier()
        start = time.perf_counter()
        rows = self.read(batch)
        forward = time.perf_counter() - start
        if not self._slopes:
            self._slopes = [torch.ones_like(each) for each in rows]
        dist.barrier()
        start = time.perf_counter()
        torch.autograd.backward(rows, self._slopes)
        return forward, time.perf_counter() - start

    def reset(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def add_gradients(self) -> None:
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.add_(parameter.grad.coalesce())  # duplicates summed first, so that all ways round alike


@dataclass(frozen=True)
class OnRank:
    disagreeing: dict[str, float]  # ways, by the largest difference of their rows
    seconds: dict[str, dict[str, list[float]]]  # of each phase, by way
    others: float


def lookups(ranks: Ranks, count: int, case: Case, repeats: int) -> list[Measurement]:
    """Forward, backward, and both."""
    on_ranks: list[OnRank] = ranks.run(count, _on_rank, count, case, repeats)
    about = f"{case.about} each, {count} ranks"
    for way, off in (pair for found in on_ranks for pair in found.disagreeing.items()):
        raise DisagreementError(
            f"{about}: rows of {way!r} differ from those of {PLANNED!r} by up to {off:.2e}; their times cannot be "
            "compared"
        )
    timings = {phase: slowest([found.seconds[phase] for found in on_ranks]) for phase in (FORWARD, BACKWARD)}
    timings[BOTH] = {
        way: Timing(tuple(map(sum, zip(timings[FORWARD][way].seconds, timings[BACKWARD][way].seconds, strict=True))))
        for way in WAYS
    }
    name, others = f"{case.name}-{count}", on_ranks[0].others
    return [Measurement(phase, name, f"{phase}: {about}", 1, timings[phase], {}, others) for phase in PHASES]


def _on_rank(rank: int, ranks: int, case: Case, repeats: int) -> OnRank:
    pool = [Batch(case, ids) for ids in cases.batches_of_ids(case, ranks * cases.POOL)[rank::ranks]]
    ways = _ways(case)
    disagreeing = _disagreeing(ways, pool[0])
    _take_turns(ways, pool, ROUNDS_BEFORE)
    with watch(other_pids(rank, ranks)) as load, no_garbage_collection():
        seconds = _take_turns(ways, pool, repeats)
    return OnRank(disagreeing, seconds, load.others)


def _ways(case: Case) -> dict[str, Way]:
    whole = torch.randn(case.tables * case.rows, case.dim, generator=torch.Generator().manual_seed(1))
    plain = {
        f"table {number}": nn.Embedding(case.rows, case.dim, sparse=True, _weight=weight)
        for number, weight in enumerate(whole.chunk(case.tables))
    }
    one = ShardedEmbedding(len(whole), case.dim, _weight=whole)
    planned = ShardedEmbeddingCollection(plain)
    divided = ShardedEmbeddingCollection(plain, plan=dict.fromkeys(plain, "divided"))
    apart = [ShardedEmbedding.from_embedding(table) for table in plain.values()]
    return {
        ONE: Way([one], lambda batch: [one(batch.joint)]),
        PLANNED: Way([planned], lambda batch: list(planned(batch.by_name).values())),
        DIVIDED: Way([divided], lambda batch: list(divided(batch.by_name).values())),
        APART: Way(apart, lambda batch: [table(ids) for table, ids in zip(apart, batch.ids, strict=True)]),
    }


def _disagreeing(ways: dict[str, Way], batch: Batch) -> dict[str, float]:
    """Rows must be the same as they are, and after gradients were added to them: those are exact."""
    before, after = {}, {}
    for name, way in ways.items():
        before[name] = torch.cat(way.read(batch)).detach()
        way.turn(batch)
        way.add_gradients()
        way.reset()
        after[name] = torch.cat(way.read(batch)).detach()
    off = {name: max((read[name] - read[PLANNED]).abs().max().item() for read in (before, after)) for name in ways}
    return {name: difference for name, difference in off.items() if difference != 0}


def _take_turns(ways: dict[str, Way], pool: Sequence[Batch], repeats: int) -> dict[str, dict[str, list[float]]]:
    seconds: dict[str, dict[str, list[float]]] = {phase: {name: [] for name in ways} for phase in (FORWARD, BACKWARD)}
    for number in range(repeats):
        for name, way in ways.items():
            forward, backward = way.turn(pool[number % len(pool)])
            seconds[FORWARD][name].append(forward)
            seconds[BACKWARD][name].append(backward)
            way.reset()
    return seconds

"""The time of a training step at several numbers of ranks, and where the step of a sharded table spends it."""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from benchmarks import cases
from benchmarks.cases import Case
from benchmarks.contenders import DisagreementError, touch_state
from benchmarks.distributed.stopwatch import Stopwatch
from benchmarks.distributed.training import DEFERRED, DENSE_DDP, OUR_DDP, SHARDED, TORCH_DDP, Trainer, trainer
from benchmarks.load import watch
from benchmarks.timing import Measurement, Timing, no_garbage_collection
from tests.helpers.ranks import Ranks

WAYS = (SHARDED, DEFERRED, TORCH_DDP, OUR_DDP)
MODELS = {SHARDED: TORCH_DDP, OUR_DDP: TORCH_DDP, DEFERRED: DENSE_DDP}  # what each must agree with

AGREEING_STEPS = 3
# A tenth of a step. Where the sum of a frequent row's gradients all but cancels, its rounding decides the direction.
LARGEST_DIFFERENCE = 1e-4
LARGEST_MEAN_DIFFERENCE = 1e-8


@dataclass(frozen=True)
class Breakdown:
    """Milliseconds of a step's stages: medians over steps, the mean over ranks."""

    about: str
    ranks: int
    way: str
    stages: dict[str, float]


@dataclass(frozen=True)
class OnRank:
    """What one rank answers."""

    differences: dict[str, tuple[float, float]]  # the largest, and the mean
    seconds: dict[str, list[float]]
    stages: dict[str, dict[str, float]]
    others: float


def steps(ranks: Ranks, count: int, case: Case, batches: int, repeats: int) -> tuple[Measurement, list[Breakdown]]:
    """Ranks share one batch: any number of them does the same work."""
    on_ranks: list[OnRank] = ranks.run(count, _on_rank, count, case, batches, repeats)
    about = f"{case.about}, {count} rank{'s' * (count > 1)}"
    for found in on_ranks:
        for way, differences in found.differences.items():
            check(about, way, MODELS[way], differences)
    timings = slowest([found.seconds for found in on_ranks])
    measured = Measurement("step", f"{case.name}-{count}", about, 1, timings, {}, on_ranks[0].others)
    return measured, [Breakdown(about, count, way, _mean_stages(on_ranks, way)) for way in (SHARDED, DEFERRED)]


def check(about: str, way: str, model: str, difference: tuple[float, float]) -> None:
    largest, mean = difference
    if not (largest <= LARGEST_DIFFERENCE and mean <= LARGEST_MEAN_DIFFERENCE):
        raise DisagreementError(
            f"{about}: weights of {way!r} differ from those of {model!r} by up to {largest:.2e}, "
            f"on average {mean:.2e}; their times cannot be compared"
        )


def slowest(on_ranks: Sequence[dict[str, list[float]]]) -> dict[str, Timing]:
    """A turn has taken as long as it took the slowest rank."""
    return {way: Timing(tuple(map(max, zip(*(found[way] for found in on_ranks), strict=True)))) for way in on_ranks[0]}


def _mean_stages(on_ranks: list[OnRank], way: str) -> dict[str, float]:
    names = on_ranks[0].stages[way]
    return {name: 1e3 * statistics.mean(found.stages[way][name] for found in on_ranks) for name in names}


def _on_rank(rank: int, ranks: int, case: Case, batches: int, repeats: int) -> OnRank:
    share = case.ids // ranks
    pool = [ids[rank * share : (rank + 1) * share] for (ids,) in cases.batches_of_ids(case, batches)]
    trainers = {way: _begin(way, case, pool) for way in WAYS}
    differences = _differences(trainers, _begin(DENSE_DDP, case, pool))
    _warm_up(trainers, batches)
    with watch(other_pids(rank, ranks)) as load, no_garbage_collection():
        seconds = take_turns(trainers, repeats)
    stages = {way: Stopwatch(trainers[way]).medians(repeats) for way in (SHARDED, DEFERRED)}
    return OnRank(differences, seconds, stages, load.others)


def _begin(way: str, case: Case, pool: list[Tensor]) -> Trainer:
    begun = trainer(way, case, itertools.cycle(pool))
    for _ in range(AGREEING_STEPS):
        begun.step()
    return begun


def _differences(trainers: dict[str, Trainer], dense: Trainer) -> dict[str, tuple[float, float]]:
    found = {}
    for way, model in MODELS.items():
        found[way] = difference(trainers[way], (trainers | {DENSE_DDP: dense})[model])
    return found


def difference(ours: Trainer, theirs: Trainer) -> tuple[float, float]:
    """Of the weights: the largest, and the mean."""
    found = (ours.weights() - theirs.weights()).abs_()
    return found.max().item(), found.mean().item()


def _warm_up(trainers: dict[str, Trainer], batches: int) -> None:
    for begun in trainers.values():
        for optimizer in begun.optimizers:
            touch_state(optimizer)
    for _ in range(batches):  # how long a row has waited is nothing to the others
        trainers[DEFERRED].step()


def take_turns(trainers: Mapping[str, Trainer], repeats: int) -> dict[str, list[float]]:
    """All ranks go as many rounds: the time that has passed, which differs among them, must not decide."""
    seconds: dict[str, list[float]] = {way: [] for way in trainers}
    for _ in range(repeats):
        for way, begun in trainers.items():
            dist.barrier()
            start = time.perf_counter()
            begun.step()
            seconds[way].append(time.perf_counter() - start)
    return seconds


def other_pids(rank: int, ranks: int) -> Iterator[int]:
    """Of the other ranks."""
    pids: list[int | None] = [None] * ranks
    dist.all_gather_object(pids, os.getpid())
    return (pid for number, pid in enumerate(pids) if pid is not None and number != rank)

"""The suite `distributed`: tables divided among ranks, against one process and against replicated tables."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from benchmarks.bars import Bar
from benchmarks.distributed import agreement, bars, checkpoints, costs, report, timings
from benchmarks.distributed.sizes import BALANCED_RANKS, FULL, QUICK, Sizes
from benchmarks.suite import Part, Suite
from ranks import Ranks

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console

TIMEOUT = 300.0  # seconds: checking, warming up and timing the largest case takes a minute


class DistributedSuite(Suite):
    file = "distributed"
    own_threads = "has one thread per rank"

    balance: costs.Balance | None = None

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.ranks = Ranks(timeout=TIMEOUT)
        self.agreements: list[agreement.Agreement] = []
        self.costs: list[costs.Cost] = []
        self.resharding: list[checkpoints.Resharding] = []
        self.breakdowns: list[timings.Breakdown] = []

    @property
    def sizes(self) -> Sizes:
        return QUICK if self.quick else FULL

    def parts(self) -> Iterator[Part]:
        yield Part("agreement", self._agree)
        yield Part("costs", self._count)
        yield Part("checkpoints", self._reshard)
        yield Part("balance", self._balance)
        for count in self.sizes.timed_counts:
            yield Part(f"ranks-{count}", functools.partial(self._time, count))

    def _agree(self) -> None:
        sizes = self.sizes
        self.agreements += agreement.compare(self.ranks, sizes.counts, sizes.agreement, sizes.agreement_steps)

    def _count(self) -> None:
        sizes = self.sizes
        self.costs += costs.count(self.ranks, sizes.counts, sizes.traffic, sizes.traffic_steps)

    def _reshard(self) -> None:
        sizes = self.sizes
        self.resharding += checkpoints.reshard(self.ranks, sizes.saved_by, sizes.loaded_by, sizes.agreement)

    def _balance(self) -> None:
        self.balance = costs.balance(self.sizes.balance, BALANCED_RANKS, self.sizes.balance_steps)

    def _time(self, count: int) -> None:
        sizes = self.sizes
        measured, stages = timings.steps(self.ranks, count, sizes.timed, sizes.timed_batches, self.repeats)
        self.measurements.append(measured)
        self.breakdowns += stages

    def bars(self) -> Iterator[Bar]:
        yield from bars.agreeing(self.agreements)
        yield from bars.costs(self.costs)
        yield from bars.resharded(self.resharding)
        if self.balance:
            yield from bars.balanced(self.balance)

    def show(self, console: Console) -> None:
        if self.agreements:
            console.print(report.agreements(self.agreements))
        if self.costs:
            console.print(report.costs(self.costs))
        if self.balance:
            console.print(report.balance(self.balance))
        for resharded in self.resharding:
            console.print(report.resharding(resharded))
        if self.measurements:
            console.print(report.steps(self.measurements), report.ONE_THREAD, sep="\n")
            console.print(report.breakdowns(self.breakdowns))

    def draw(self, figure: Figure) -> bool:
        return False

    def findings(self) -> dict[str, Any]:
        return {
            "agreement": [asdict(found) for found in self.agreements],
            "costs": [asdict(found) for found in self.costs],
            "balance": asdict(self.balance) if self.balance else None,
            "checkpoints": [asdict(found) for found in self.resharding],
            "breakdown_ms": [asdict(found) for found in self.breakdowns],
        }

    def close(self) -> None:
        self.ranks.close()

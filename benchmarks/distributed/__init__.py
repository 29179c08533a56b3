"""The suite `distributed`: tables on several ranks, one or many, against one process and against replicated tables."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from benchmarks.bars import Bar
from benchmarks.distributed import (
    agreement,
    bars,
    checkpoints,
    costs,
    many,
    messages,
    plans,
    report,
    timings,
    together,
    whole,
)
from benchmarks.distributed.sizes import BALANCED_RANKS, FULL, QUICK, WHOLE_STEP_RANKS, Sizes
from benchmarks.suite import Part, Suite
from tests.helpers.ranks import Ranks

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
        self.together: list[agreement.Agreement] = []
        self.messages: list[messages.Messages] = []
        self.plans: list[plans.Planned] = []

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
        yield Part("together", self._agree_together)
        yield Part("messages", self._count_messages)
        yield Part("plans", self._plan)
        for count in self.sizes.tables_counts:
            yield Part(f"tables-{count}", functools.partial(self._time_lookups, count))
        yield Part(f"whole-step-{WHOLE_STEP_RANKS}", self._time_whole_step)

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

    def _agree_together(self) -> None:
        self.together += together.compare(self.ranks, self.sizes.counts, self.sizes.together_steps)

    def _count_messages(self) -> None:
        sizes = self.sizes
        self.messages += messages.count(self.ranks, sizes.messages_counts, sizes.messages_tables, sizes.messages_steps)

    def _plan(self) -> None:
        sizes = self.sizes
        self.plans += plans.simulate(sizes.planned_counts, sizes.planned_tables, sizes.planned_steps)

    def _time_lookups(self, count: int) -> None:
        self.measurements += many.lookups(self.ranks, count, self.sizes.tables, self.repeats)

    def _time_whole_step(self) -> None:
        self.measurements.append(whole.steps(self.ranks, WHOLE_STEP_RANKS, self.sizes.tables, self.repeats))

    def bars(self) -> Iterator[Bar]:
        yield from bars.agreeing(self.agreements)
        yield from bars.costs(self.costs)
        yield from bars.resharded(self.resharding)
        if self.balance:
            yield from bars.balanced(self.balance)
        yield from bars.agreeing(self.together)
        yield from bars.messages(self.messages)
        yield from bars.planned(self.plans)
        for measured in self.measurements:
            yield from bars.timed(measured)

    def show(self, console: Console) -> None:
        if self.agreements:
            console.print(report.agreements(self.agreements))
        if self.costs:
            console.print(report.costs(self.costs))
        if self.balance:
            console.print(report.balance(self.balance))
        for resharded in self.resharding:
            console.print(report.resharding(resharded))
        if self.breakdowns:
            console.print(report.steps(self.of_kind("step")), report.ONE_THREAD, sep="\n")
            console.print(report.breakdowns(self.breakdowns))
        self._show_many(console)

    def _show_many(self, console: Console) -> None:
        if self.together:
            console.print(report.agreements(self.together, "optimizer, plan"))
        if self.messages:
            console.print(report.messages(self.messages))
        if self.plans:
            console.print(report.plans(self.plans))
        if lookups := self.of_kind(*many.PHASES):
            console.print(report.lookups(lookups), report.OWN_BATCHES, sep="\n")
        if steps := self.of_kind("whole step"):
            console.print(report.whole_steps(steps), report.OWN_BATCHES, sep="\n")

    def draw(self, figure: Figure) -> bool:
        return False

    def findings(self) -> dict[str, Any]:
        return {
            "agreement": [asdict(found) for found in self.agreements],
            "costs": [asdict(found) for found in self.costs],
            "balance": asdict(self.balance) if self.balance else None,
            "checkpoints": [asdict(found) for found in self.resharding],
            "breakdown_ms": [asdict(found) for found in self.breakdowns],
            "together": [asdict(found) for found in self.together],
            "messages": [asdict(found) for found in self.messages],
            "plans": [asdict(found) for found in self.plans],
        }

    def close(self) -> None:
        self.ranks.close()

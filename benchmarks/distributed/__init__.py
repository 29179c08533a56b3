"""The suite `distributed`: tables on several ranks, against tables that every rank has whole."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from benchmarks.cases import MANY, TINY_MANY, TINY_ZIPF, ZIPF, Case
from benchmarks.distributed import counts, training
from benchmarks.distributed.training import OUR_DDP, SHARDED, TORCH_DDP, WAYS
from benchmarks.report import Grid, times
from benchmarks.suite import Bar, Part, Suite
from tests.helpers.ranks import Ranks

TIMEOUT = 300.0  # seconds: checking, warming up and timing the largest case takes a minute

BALANCED_RANKS = 8  # only simulated
OVER_MEAN_LOAD = 1.1
COLLECTIVES = 6  # per step, for any number of tables
FORMULA_OFF = 2  # percent
MANY_TABLES = 5  # times faster than whole tables on every rank under torch's DDP

ONE_THREAD = "One torch thread per rank, all ranks on this machine. The batch is divided among them."
RATIOS = {"torch DDP/\nsharded": (TORCH_DDP, SHARDED), "torch DDP/\nrowstep ddp": (TORCH_DDP, OUR_DDP)}


class Sizes(NamedTuple):
    balance: Case  # ids are those of one rank
    balance_steps: int
    messages: tuple[tuple[int, int], ...]  # ranks and tables
    messages_steps: int
    timed: tuple[tuple[str, Case, int], ...]  # the part, a case whose ids are those of all ranks together, and ranks


# DeferredAdam is warmed up for as many steps as there are batches, so that rows have waited: the rarest comes every 220
# steps.
_TIMED, _TABLES = replace(ZIPF, batches=300), replace(MANY, batches=50)
FULL = Sizes(
    balance=Case("balance", 1_000_000, 64, 8_192, zipf=True),
    balance_steps=50,
    messages=tuple((ranks, tables) for ranks in (2, 4) for tables in (1, 26, 200)),
    messages_steps=3,
    timed=(("ranks-1", _TIMED, 1), ("ranks-2", _TIMED, 2), ("tables-2", _TABLES, 2)),
)
QUICK = Sizes(
    balance=Case("balance", 10_000, 8, 512, zipf=True),
    balance_steps=2,
    messages=((2, 1), (2, 5)),
    messages_steps=1,
    timed=(("ranks-1", TINY_ZIPF, 1), ("ranks-2", TINY_ZIPF, 2), ("tables-2", TINY_MANY, 2)),
)


class DistributedSuite(Suite):
    file = "distributed"
    own_threads = "has one thread per rank"

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.ranks = Ranks(timeout=TIMEOUT)
        self.sizes = QUICK if self.quick else FULL

    def parts(self) -> Iterator[Part]:
        yield Part("balance", self._balance)
        yield Part("messages", self._messages)
        for name, case, count in self.sizes.timed:
            yield Part(name, functools.partial(self._time, case, count))

    def _balance(self) -> None:
        self.findings["balance"] = found = counts.balance(self.sizes.balance, BALANCED_RANKS, self.sizes.balance_steps)
        what = f"busiest of {BALANCED_RANKS} ranks over the mean: {found['about']}"
        self.bars.append(Bar(what, OVER_MEAN_LOAD, found["spread"], "x"))

    def _messages(self) -> None:
        found = [counts.messages(self.ranks, *size, self.sizes.messages_steps) for size in self.sizes.messages]
        self.findings["messages"] = found
        for one in found:
            what = f"collectives per step: {one['tables']} table{'s' * (one['tables'] > 1)}, {one['ranks']} ranks"
            self.bars.append(Bar(what, COLLECTIVES, one["collectives"]))
        most = found[-1]
        what = f"bytes sent by a rank, off the formula: {most['tables']} tables, {most['ranks']} ranks"
        self.bars.append(Bar(what, FORMULA_OFF, most["off"], "%"))

    def _time(self, case: Case, count: int) -> None:
        measured, stages = training.steps(self.ranks, count, case, self.repeats)
        self.measurements.append(measured)
        self.findings.setdefault("stages_ms", []).extend(stages)
        if case.tables > 1:
            self.expect_faster("step of many tables vs torch DDP", measured, SHARDED, TORCH_DDP, MANY_TABLES)

    def tables(self) -> Iterator[Grid | str]:
        if found := self.findings.get("balance"):
            yield (
                f"{found['about']}: the busiest of {BALANCED_RANKS} ranks has {found['spread']:.3f} times the mean "
                f"load; with blocks of ids it would have {found['blocks']:.1f} times as much."
            )
        if messages := self.findings.get("messages"):
            headings = ["tables", "ranks", "collectives\nper step", "MB sent\nper step", "formula", "off"]
            lines = [
                [str(one["tables"]), str(one["ranks"]), f"{one['collectives']:g}"]
                + [f"{one[key] / 1e6:.3f}" for key in ("sent", "formula")]
                + [f"{one['off']:.2f}%"]
                for one in messages
            ]
            yield Grid("Messages of a step of tables that are looked up together", headings, lines, words=0)
        if self.measurements:
            yield times("One training step (forward, backward, step)", self.measurements, WAYS, RATIOS)
            yield ONE_THREAD
            yield self._stages()

    def _stages(self) -> Grid:
        def cell(stages: dict[str, float], stage: str) -> str:
            return f"{stages[stage]:.2f} {stages[stage] / sum(stages.values()):4.0%}"

        found = self.findings["stages_ms"]
        headings = ["stage", *(f"{one['way'].replace(', ', chr(10))}\n{one['about']}" for one in found)]
        lines = [[stage, *(cell(one["stages"], stage) for one in found)] for stage in training.STAGES]
        return Grid("Where the step of a sharded table spends its time: median of each stage in ms", headings, lines)

    def close(self) -> None:
        self.ranks.close()

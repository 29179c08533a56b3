"""The suite `distributed`: tables on several ranks, against tables that every rank has whole."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from benchmarks.cases import MANY, TINY_MANY, TINY_ZIPF, ZIPF, Case
from benchmarks.distributed import training
from benchmarks.distributed.training import OUR_DDP, SHARDED, TORCH_DDP, WAYS
from benchmarks.report import Grid, times
from benchmarks.suite import Part, Suite
from tests.helpers.ranks import Ranks

TIMEOUT = 300.0  # seconds: checking, warming up and timing the largest case takes a minute

MANY_TABLES = 5  # times faster than whole tables on every rank under torch's DDP

ONE_THREAD = "One torch thread per rank, all ranks on this machine. The batch is divided among them."
RATIOS = {"torch DDP/\nsharded": (TORCH_DDP, SHARDED), "torch DDP/\nrowstep ddp": (TORCH_DDP, OUR_DDP)}


# DeferredAdam is warmed up for as many steps as there are batches, so that rows have waited: the rarest comes every 220
# steps.
_TIMED, _TABLES = replace(ZIPF, batches=300), replace(MANY, batches=50)
# The part, a case whose ids are those of all ranks together, and ranks.
FULL = (("ranks-1", _TIMED, 1), ("ranks-2", _TIMED, 2), ("tables-2", _TABLES, 2))
QUICK = (("ranks-1", TINY_ZIPF, 1), ("ranks-2", TINY_ZIPF, 2), ("tables-2", TINY_MANY, 2))


class DistributedSuite(Suite):
    file = "distributed"
    own_threads = "has one thread per rank"

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.ranks = Ranks(timeout=TIMEOUT)

    def parts(self) -> Iterator[Part]:
        for name, case, count in QUICK if self.quick else FULL:
            yield Part(name, functools.partial(self._time, case, count))

    def _time(self, case: Case, count: int) -> None:
        measured, stages = training.steps(self.ranks, count, case, self.repeats)
        self.measurements += measured
        self.findings.setdefault("stages_ms", []).extend(stages)
        if case.tables > 1:
            self.expect_faster("loop of many tables vs torch DDP", measured[-1], SHARDED, TORCH_DDP, MANY_TABLES)

    def tables(self) -> Iterator[Grid | str]:
        if self.measurements:
            yield times("The optimizers' step", self.of_kind("step"), WAYS, RATIOS)
            yield times("Whole loop: forward, backward and step", self.of_kind("loop"), WAYS, RATIOS)
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

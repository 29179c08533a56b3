"""What sharded tables are to reach. Only what was measured is listed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.bars import Bar, faster, not_much_slower
from benchmarks.distributed.agreement import TOLERANCES, Agreement
from benchmarks.distributed.checkpoints import Resharding
from benchmarks.distributed.costs import Balance, Cost
from benchmarks.distributed.many import ONE, PHASES, PLANNED
from benchmarks.distributed.messages import Messages
from benchmarks.distributed.plans import Planned
from benchmarks.distributed.sizes import BALANCED_RANKS
from benchmarks.distributed.training import TORCH_DDP
from benchmarks.distributed.whole import TOGETHER
from benchmarks.timing import Measurement

FORMULA_OFF = 2  # percent
TIMES_ITS_SHARE = 1.05  # of memory
OVER_MEAN_LOAD = 1.1
OVER_MEAN_BYTES = 1.1
COLLECTIVES = 6  # per step, for any number of tables
OVER_ONE_TABLE = 1.5
WHOLE_STEP = 5  # times faster than whole tables on every rank under torch's DDP


def agreeing(found: Sequence[Agreement]) -> Iterator[Bar]:
    for agreement in found:
        what = f"{agreement.dtype}, largest difference from one process: {agreement.about}, {agreement.ranks} ranks"
        yield Bar(what, TOLERANCES[agreement.dtype], agreement.worst, "")


def costs(found: Sequence[Cost]) -> Iterator[Bar]:
    for cost in found:
        where = f"{cost.about}, {cost.ranks} ranks"
        yield Bar(f"bytes sent by a rank, off the formula: {where}", FORMULA_OFF, cost.off, "%")
        share = max(cost.memory.values())
        what = f"weights and moments of a rank, over those of one process: {where}"
        yield Bar(what, round(TIMES_ITS_SHARE / cost.ranks, 4), share, "x")


def resharded(found: Sequence[Resharding]) -> Iterator[Bar]:
    for one in found:
        ranks = f"saved by {one.saved_by}, loaded by {one.loaded_by}"
        yield Bar(f"bytes that differ after loading and going on: {ranks}", 0, one.different, "")


def balanced(found: Balance) -> Iterator[Bar]:
    what = f"busiest of {BALANCED_RANKS} ranks over the mean: {found.about}"
    yield Bar(what, OVER_MEAN_LOAD, found.spread, "x")


def messages(found: Sequence[Messages]) -> Iterator[Bar]:
    for one in found:
        where = f"{one.tables} table{'s' * (one.tables > 1)}, {one.ranks} ranks"
        yield Bar(f"collectives per step: {where}", COLLECTIVES, one.collectives, "")
    if found:
        most = max(found, key=lambda one: (one.ranks, one.tables))
        what = f"bytes sent by a rank, off the plan's formula: {most.tables} tables, {most.ranks} ranks"
        yield Bar(what, FORMULA_OFF, most.off, "%")


def planned(found: Sequence[Planned]) -> Iterator[Bar]:
    for one in found:
        where = f"{one.about}, {one.ranks} ranks"
        yield Bar(f"bytes of the fullest rank over the mean, as planned: {where}", OVER_MEAN_BYTES, one.bytes, "x")
        yield Bar(f"traffic of the busiest rank over the mean, as planned: {where}", OVER_MEAN_LOAD, one.load, "x")


def timed(measured: Measurement) -> Iterator[Bar]:
    if measured.kind in PHASES:
        yield from not_much_slower("collection over one table", measured, PLANNED, ONE, OVER_ONE_TABLE)
    if measured.kind == "whole step":
        yield from faster("whole step vs torch DDP", measured, TOGETHER, TORCH_DDP, WHOLE_STEP)

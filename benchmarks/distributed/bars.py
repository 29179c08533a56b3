"""What sharded tables are to reach. Only what was measured is listed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.bars import Bar
from benchmarks.distributed.agreement import TOLERANCES, Agreement
from benchmarks.distributed.checkpoints import Resharding
from benchmarks.distributed.costs import Balance, Cost
from benchmarks.distributed.sizes import BALANCED_RANKS

FORMULA_OFF = 2  # percent
TIMES_ITS_SHARE = 1.05  # of memory
OVER_MEAN_LOAD = 1.1


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

"""The tables and sentences of the suite `distributed`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from benchmarks import report
from benchmarks.distributed import many, whole
from benchmarks.distributed.agreement import Agreement
from benchmarks.distributed.checkpoints import Resharding
from benchmarks.distributed.costs import Balance, Cost
from benchmarks.distributed.messages import Messages
from benchmarks.distributed.plans import Planned
from benchmarks.distributed.sizes import BALANCED_RANKS
from benchmarks.distributed.timings import WAYS, Breakdown
from benchmarks.distributed.training import OUR_DDP, SHARDED, TORCH_DDP
from benchmarks.timing import Measurement

if TYPE_CHECKING:
    from rich.table import Table

RATIOS = {"torch DDP/\nsharded": (TORCH_DDP, SHARDED), "torch DDP/\nrowstep ddp": (TORCH_DDP, OUR_DDP)}
ONE_THREAD = "One torch thread per rank, all ranks on this machine. The batch is divided among them."
LOOKUP_RATIOS = {
    "collection/\none table": (many.PLANNED, many.ONE),
    "divided/\none table": (many.DIVIDED, many.ONE),
    "apart/\ncollection": (many.APART, many.PLANNED),
}
WHOLE_RATIOS = {"torch DDP/\ncollection": (TORCH_DDP, whole.TOGETHER)}
OWN_BATCHES = "One torch thread per rank, all ranks on this machine. Ids are those of one rank."


def agreements(found: Sequence[Agreement], what_differs: str = "optimizer, table") -> Table:
    headings = [what_differs, *(f"{one.ranks} ranks\n{one.dtype}" for one in found)]
    table = report.table_of_numbers(headings, title=f"Largest difference from one process: {found[0].about}")
    for what in found[0].differences:
        table.add_row(what, *(f"{one.differences[what]:.1e}" for one in found))
    return table


def costs(found: Sequence[Cost]) -> Table:
    headings = ["case", "ranks", "MB sent\nper step", "formula", "MB kept,\nSparseAdam", "MB kept,\nDeferredAdam"]
    table = report.table_of_numbers(
        headings, title="A rank's bytes", caption="Kept: weights and moments, beside the share of one process's."
    )
    for cost in found:
        sent, formula = (max(numbers) / 1e6 for numbers in (cost.sent, cost.formula))
        kept = [f"{cost.kept[name] / 1e6:,.1f} ({cost.memory[name]:.1%})" for name in cost.kept]
        table.add_row(cost.about, str(cost.ranks), f"{sent:.3f}", f"{formula:.3f}", *kept)
    return table


def balance(found: Balance) -> str:
    return (
        f"{found.about}: the busiest of {BALANCED_RANKS} ranks has {found.spread:.3f} times the mean load; "
        f"with blocks of ids it would have {found.blocks:.1f} times as much."
    )


def resharding(found: Resharding) -> str:
    result = "the same bits" if not found.different else f"{found.different:,} bytes differ"
    return f"Saved by {found.saved_by} ranks, loaded by {found.loaded_by}: {result} in {found.compared:,} bytes."


def steps(measurements: Sequence[Measurement]) -> Table:
    return report.times("One training step (forward, backward, step)", measurements, WAYS, RATIOS)


def breakdowns(found: Sequence[Breakdown]) -> Table:
    headings = [
        "stage",
        *(f"{one.way.replace(', ', chr(10))}\n{one.ranks} rank{'s' * (one.ranks > 1)}" for one in found),
    ]
    table = report.table_of_numbers(
        headings, title="Where the step of a sharded table spends its time: median of each stage in ms"
    )
    for stage in found[0].stages:
        table.add_row(stage, *(_with_share(one, stage) for one in found))
    table.add_row("all", *(f"{sum(one.stages.values()):.2f} 100%" for one in found))
    return table


def _with_share(found: Breakdown, stage: str) -> str:
    return f"{found.stages[stage]:.2f} {found.stages[stage] / sum(found.stages.values()):4.0%}"


def messages(found: Sequence[Messages]) -> Table:
    headings = ["tables", "ranks", "collectives\nper step", "MB sent\nper step", "formula", "off"]
    table = report.table_of_numbers(headings, title="Messages of a step of tables that are looked up together", words=0)
    for one in found:
        sizes = (f"{one.sent / 1e6:.3f}", f"{one.formula / 1e6:.3f}", f"{one.off:.2f}%")
        table.add_row(str(one.tables), str(one.ranks), f"{one.collectives:g}", *sizes)
    return table


def plans(found: Sequence[Planned]) -> Table:
    headings = ["model", "ranks", "on one\nrank", "divided", "every-\nwhere", "bytes", "traffic", "planned\nin s"]
    table = report.table_of_numbers(
        headings,
        title="Plans, simulated: the fullest and the busiest rank over the mean",
        caption="In brackets: what the plan expects.",
    )
    for one in found:
        places = (str(one.places.get(place, 0)) for place in ("on one rank", "divided", "everywhere"))
        reached = (f"{one.bytes:.3f} ({one.expected_bytes:.3f})", f"{one.load:.3f} ({one.expected_load:.3f})")
        table.add_row(one.about, str(one.ranks), *places, *reached, f"{one.seconds:.2f}")
    return table


def lookups(measurements: Sequence[Measurement]) -> Table:
    return report.times("Lookup of many tables", measurements, many.WAYS, LOOKUP_RATIOS)


def whole_steps(measurements: Sequence[Measurement]) -> Table:
    return report.times("One training step of many tables", measurements, whole.WAYS, WHOLE_RATIOS)

"""What is counted and not timed: how evenly ranks are loaded, and what a step of many tables sends."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.cases import Case, popularity, short
from rowstep import SparseAdam
from rowstep._layout import RowOrder
from rowstep.distributed import ShardedEmbeddingCollection, count_traffic
from tests.helpers.ranks import Ranks

WIDTHS = (4, 8, 16, 24, 32, 64)
FEWEST_ROWS, MOST_ROWS, FEWEST_IDS, MOST_IDS = 100, 100_000, 16, 2_048


def balance(case: Case, ranks: int, steps: int) -> dict[str, Any]:
    """The load of the busiest rank over the mean, in the worst step: with rows spread, and with blocks of ids.

    Every rank wants its distinct ids; the load of a rank is how many rows others, and itself, want of it.
    """
    rng, popular = np.random.default_rng(0), popularity(case.rows)  # the most frequent row has id 0
    drawn = [popular.searchsorted(rng.random((ranks, case.ids))) for _ in range(steps)]
    batches = [torch.from_numpy(np.concatenate([*map(np.unique, of_ranks)])) for of_ranks in drawn]
    orders = {"spread": RowOrder.spread(case.rows), "blocks": RowOrder.by_id(case.rows)}
    worst = {name: max(_busiest(wanted, order, ranks) for wanted in batches) for name, order in orders.items()}
    return {"about": f"{short(case.rows)} rows, {case.ids:,} Zipf ids per rank, sorted by popularity", **worst}


def _busiest(wanted: Tensor, order: RowOrder, ranks: int) -> float:
    owners = order.positions(wanted) // -(-order.rows // ranks)
    load = owners.bincount(minlength=ranks).double()
    return float(load.max() / load.mean())


def messages(ranks: Ranks, count: int, tables: int, steps: int) -> dict[str, float]:
    """Collectives per step, of the rank with the most; bytes that a rank sends per step, and docs/scaling.md's formula.

    `off` is how far the formula is off, in percent.
    """
    collectives, *volumes = zip(*ranks.run(count, _counted, count, tables, steps), strict=True)
    sent, formula = map(statistics.mean, volumes)
    off = 100 * abs(sent / formula - 1)
    return {
        "tables": tables, "ranks": count, "collectives": max(collectives), "sent": sent, "formula": formula, "off": off
    }  # fmt: skip


def _counted(rank: int, ranks: int, tables: int, steps: int) -> tuple[float, float, float]:
    """Collectives and bytes sent by this rank per step, and what the formula says of the bytes."""
    sizes, ids = _tables(tables)
    collection = ShardedEmbeddingCollection(dict(sizes), plan=dict.fromkeys(sizes, "divided"))
    optimizer = SparseAdam(collection.parameters())
    batches = list(_batches(sizes, ids, steps, seed=rank))
    with count_traffic() as traffic:
        for batch in batches:
            optimizer.zero_grad()
            read: dict[str, Tensor] = collection(batch)
            torch.autograd.backward([rows.sum() for rows in read.values()])
            optimizer.step()
    # Row numbers of 4 bytes, rows and gradients in float32, and headers and votes once for all tables.
    lookups = [(len(torch.unique(given)), sizes[name][1]) for batch in batches for name, given in batch.items()]
    rows = sum(distinct * (4 + 2 * width * 4) for distinct, width in lookups) / steps
    told = rows * (ranks - 1) / ranks + 48 * (ranks - 1)
    return sum(traffic.collectives.values()) / steps, traffic.total / steps, told


def _tables(count: int) -> tuple[dict[str, tuple[int, int]], dict[str, int]]:
    """Rows and width of each, and how many ids a rank looks up in it: the same on every rank."""
    rng = np.random.default_rng(0)
    names = [f"table {number}" for number in range(count)]
    rows, ids = (
        np.exp(rng.uniform(np.log(least), np.log(most), count)).astype(int).tolist()
        for least, most in ((FEWEST_ROWS, MOST_ROWS), (FEWEST_IDS, MOST_IDS))
    )
    widths = rng.choice(WIDTHS, count).tolist()
    return dict(zip(names, zip(rows, widths, strict=True), strict=True)), dict(zip(names, ids, strict=True))


def _batches(
    sizes: dict[str, tuple[int, int]], ids: dict[str, int], steps: int, seed: int
) -> Iterator[dict[str, Tensor]]:
    rng = np.random.default_rng(seed)
    popular = {name: popularity(rows) for name, (rows, _) in sizes.items()}
    for _ in range(steps):
        yield {name: torch.from_numpy(popular[name].searchsorted(rng.random(count))) for name, count in ids.items()}

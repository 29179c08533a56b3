"""What a step sends for many tables at once, counted and not timed: messages, and bytes against the plan's formula."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from benchmarks.cases import popularity
from rowstep import SparseAdam
from rowstep.distributed import ShardedEmbeddingCollection, Size, count_traffic, plan_tables
from tests.helpers.ranks import Ranks

WIDTHS = (4, 8, 16, 24, 32, 64)
FEWEST_ROWS, MOST_ROWS, FEWEST_IDS, MOST_IDS = 100, 100_000, 16, 2_048


@dataclass(frozen=True)
class Messages:
    tables: int
    ranks: int
    collectives: float  # per step, of the rank with the most
    sent: float  # bytes per step, mean of the ranks
    formula: float  # what the plan says of it, from the use that was measured

    @property
    def off(self) -> float:
        """Percent."""
        return 100 * abs(self.sent / self.formula - 1)


def count(ranks: Ranks, counts: tuple[int, ...], tables: tuple[int, ...], steps: int) -> Iterator[Messages]:
    for ranks_count in counts:
        for tables_count in tables:
            on_ranks = ranks.run(ranks_count, _counted, tables_count, steps)
            collectives, sent, formula = zip(*on_ranks, strict=True)
            yield Messages(tables_count, ranks_count, max(collectives), statistics.mean(sent), formula[0])


def _counted(rank: int, tables: int, steps: int) -> tuple[float, float, float]:
    """Collectives and bytes sent by this rank per step, and what the plan says of the bytes."""
    sizes, ids = _tables(tables)
    collection = ShardedEmbeddingCollection(dict(sizes))
    optimizer = SparseAdam(collection.parameters())
    batches = _batches(sizes, ids, steps, seed=rank)
    with count_traffic() as traffic:
        for batch in batches:
            optimizer.zero_grad()
            read: dict[str, Tensor] = collection(batch)
            torch.autograd.backward([rows.sum() for rows in read.values()])
            optimizer.step()
    plan = plan_tables(
        {name: Size(*size) for name, size in sizes.items()},
        collection.plan.ranks,
        use=collection.use(),
        fixed=collection.plan,
    )
    return sum(traffic.collectives.values()) / steps, traffic.total / steps, plan.bytes_per_step()


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


def _batches(sizes: dict[str, tuple[int, int]], ids: dict[str, int], steps: int, seed: int) -> list[dict[str, Tensor]]:
    rng = np.random.default_rng(seed)
    popular = {name: popularity(rows) for name, (rows, _) in sizes.items()}
    return [
        {name: torch.from_numpy(popular[name].searchsorted(rng.random(count))) for name, count in ids.items()}
        for _ in range(steps)
    ]

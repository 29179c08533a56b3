"""What a sharded table costs, counted and not timed: bytes sent, memory held, and how evenly ranks are loaded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.cases import Case, popularity, short
from rowstep import DeferredAdam, SparseAdam
from rowstep._layout import RowOrder
from rowstep.distributed import ShardedEmbedding, bytes_per_step, count_traffic
from rowstep.distributed._placement import Blocks
from tests.helpers.ranks import Ranks


@dataclass(frozen=True)
class Cost:
    """Of a table on so many ranks."""

    about: str
    ranks: int
    sent: list[float]  # bytes per step, by rank
    formula: list[float]  # what `bytes_per_step` says of it
    memory: dict[str, float]  # by optimizer: bytes of the fullest rank, over those of one process
    kept: dict[str, int]  # by optimizer: bytes of the fullest rank

    @property
    def off(self) -> float:
        """How far the formula is off on the rank of which it says the least, in percent."""
        return 100 * max(abs(sent / told - 1) for sent, told in zip(self.sent, self.formula, strict=True))


@dataclass(frozen=True)
class Balance:
    about: str
    spread: float  # load of the busiest rank over the mean, in the worst step
    blocks: float  # the same, had each rank a block of ids


def count(ranks: Ranks, counts: tuple[int, ...], case: Case, steps: int) -> Iterator[Cost]:
    about = f"{short(case.rows)} x {case.dim}, {case.ids:,} Zipf ids per rank"
    (_, _, whole), *_ = ranks.run(1, _counted, 1, case, 1)
    for ranks_count in counts:
        sent, formula, kept = zip(*ranks.run(ranks_count, _counted, ranks_count, case, steps), strict=True)
        most = {name: max(on_rank[name] for on_rank in kept) for name in whole}
        shares = {name: most[name] / whole[name] for name in whole}
        yield Cost(about, ranks_count, list(sent), list(formula), shares, most)


def _counted(rank: int, ranks: int, case: Case, steps: int) -> tuple[float, float, dict[str, int]]:
    """Bytes that this rank sends per step, what the formula says, and bytes that it holds with each optimizer."""
    table = ShardedEmbedding(case.rows, case.dim)
    optimizer = SparseAdam(table.parameters())
    batches = _by_popularity(case, steps, seed=rank)
    with count_traffic() as traffic:
        for ids in batches:
            _step(table, optimizer, ids)
    distinct = sum(len(torch.unique(ids)) for ids in batches) / (steps * case.ids)
    kept = {"SparseAdam": _bytes(table, optimizer)}
    deferred = DeferredAdam(table)
    _step(table, deferred, batches[0])
    kept["DeferredAdam"] = _bytes(table, deferred)
    return traffic.total / steps, bytes_per_step(case.ids, distinct, case.dim, ranks), kept


def _step(table: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor) -> None:
    optimizer.zero_grad()
    table(ids).sum().backward()
    optimizer.step()


def _bytes(table: ShardedEmbedding, optimizer: torch.optim.Optimizer) -> int:
    """Of weights and moments. A view counts with all the memory that it keeps alive."""
    kept = [table.weight, *optimizer.state[table.weight].values()]
    storages = [value.untyped_storage() for value in kept if isinstance(value, Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def balance(case: Case, ranks: int, steps: int) -> Balance:
    """Every rank wants its distinct ids; the load of a rank is how many rows others, and itself, want of it."""
    batches = [[torch.unique(ids) for ids in _by_popularity(case, ranks, seed=step)] for step in range(steps)]
    about = f"{short(case.rows)} rows, {case.ids:,} Zipf ids per rank, sorted by popularity"
    spread, by_id = RowOrder.spread(case.rows), RowOrder.by_id(case.rows)
    return Balance(about, *(max(_busiest(wanted, order, ranks) for wanted in batches) for order in (spread, by_id)))


def _busiest(wanted: list[Tensor], order: RowOrder, ranks: int) -> float:
    owners = order.positions(torch.cat(wanted)) // Blocks(order.rows, ranks).size
    load = owners.bincount(minlength=ranks).double()
    return float(load.max() / load.mean())


def _by_popularity(case: Case, batches: int, seed: int) -> list[Tensor]:
    """The most frequent row has id 0."""
    generator = torch.Generator().manual_seed(seed)
    cumulative = torch.from_numpy(popularity(case.rows))
    draws = torch.rand(batches, case.ids, generator=generator, dtype=torch.float64)
    return list(torch.searchsorted(cumulative, draws).clamp_(max=case.rows - 1))

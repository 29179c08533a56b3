"""Where tables should be: a plan for all tables of a model, from their sizes and how they are used.

    on one rank  costs least: one rank reads it, sends its rows and steps it. But that rank bears all of its memory
                 and of its traffic
    divided      every rank bears the same share of both, and every rank has some work with the table
    everywhere   for tables with too few rows to divide evenly, and too much traffic for one rank: rows need not be
                 sent, but every gradient goes to every rank, and every rank steps every row

So every table is put on one rank, but for those whose memory or traffic is more than a certain share of what a rank
ought to have. That share is the largest for which memory and traffic are balanced over ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ._costs import MEETINGS
from ._placement import DIVIDED, EVERYWHERE, Blocks, Place, Placement

BALANCED = 1.08
"""What the fullest rank of a plan may have over the mean. The aim is 1.1; what is drawn is not what is expected."""

_ROWS_PER_RANK = 20  # that a divided table needs, so that no block is over 5% larger than its share
_SHARE_FACTOR = 0.75
_USUAL_IDS = 4096
_USUAL_EXPONENT = 1.05
_HEAD, _BINS = 256, 512
_INDEX = 4  # bytes of a row number on its way


class Use(NamedTuple):
    """How a table is used by one rank in one step, on average.

    ``ShardedEmbeddingCollection.use()`` measures it, and ``plan_tables`` plans with it.

    Examples:
        >>> from rowstep.distributed import Use, plan_tables
        >>> plan = plan_tables({"user": (1000, 8)}, ranks=2, use={"user": Use(ids=512.0, distinct=300.0)})
        >>> plan.use["user"].distinct
        300.0
    """

    ids: float
    """How many ids it looks up."""
    distinct: float
    """How many of these are distinct."""


class Size(NamedTuple):
    """How large a table is.

    Examples:
        >>> import torch
        >>> from rowstep.distributed import Size
        >>> size = Size.of(torch.nn.Embedding(1000, 8))
        >>> size, size.bytes
        (Size(rows=1000, width=8, element=4), 32000)
    """

    rows: int
    """How many it has."""
    width: int
    """How many numbers a row has."""
    element: int = 4
    """Bytes of a number."""

    @classmethod
    def of(cls, table: nn.Module | tuple[int, ...]) -> Size:
        """The size of a table.

        Args:
            table: an Embedding or EmbeddingBag, sharded or not; or a tuple of rows and width.
        """
        if isinstance(table, tuple):
            return cls(*table)
        module: Any = table
        return cls(module.num_embeddings, module.embedding_dim, module.weight.element_size())

    @property
    def bytes(self) -> int:
        """Of all its weights."""
        return self.rows * self.width * self.element


class Balance(NamedTuple):
    """The fullest rank over the mean."""

    bytes: float
    load: float


class Plan(MutableMapping[str, Place]):
    """Where each table is, by name: ``"divided"``, ``"everywhere"``, or the number of a rank. ``print`` shows it.

    ``plan_tables`` makes one. Change it as you like: ``plan["country"] = "everywhere"``, ``plan["user"] = 3``.

    Args:
        sizes: of the tables, by name.
        ranks: how many there are.
        use: how each table is used.
        places: where each table is.

    Examples:
        >>> from rowstep.distributed import plan_tables
        >>> plan = plan_tables({"user": (100_000, 32), "country": (200, 8)}, ranks=4)
        >>> plan["country"] = "everywhere"
        >>> dict(plan)
        {'user': 'divided', 'country': 'everywhere'}
        >>> round(plan.balance().bytes, 2)  # the fullest rank over the mean
        1.0
    """

    def __init__(self, sizes: Mapping[str, Size], ranks: int, use: Mapping[str, Use], places: Mapping[str, Place]):
        self.sizes, self.ranks, self.use = dict(sizes), ranks, dict(use)
        self._places: dict[str, Place] = {}
        for name in sizes:
            self[name] = places[name]

    def __getitem__(self, name: str) -> Place:
        return self._places[name]

    def __setitem__(self, name: str, place: Place) -> None:
        if name not in self.sizes:
            raise KeyError(f"no table is called {name!r}; there are {', '.join(map(repr, self.sizes))}")
        self._places[name] = Placement.checked(self.sizes[name].rows, self.ranks, place).place

    def __delitem__(self, name: str) -> None:
        raise TypeError("a plan has a place for every table; expected a new place, not none")

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def bytes_of_ranks(self) -> NDArray[np.float64]:
        """Of weights, on each rank."""
        return self._of_ranks({name: size.bytes for name, size in self.sizes.items()})

    def load_of_ranks(self) -> NDArray[np.float64]:
        """Bytes that each rank sends and receives as an owner of rows, in one step."""
        return self._of_ranks({name: self._load(name) for name in self})

    def _load(self, name: str) -> float:
        """Of a table's owners together; if it is everywhere, of each."""
        size, distinct = self.sizes[name], self.use[name].distinct
        passes = 1 if self[name] == EVERYWHERE else 2
        return self.ranks * distinct * (_INDEX + passes * size.width * size.element)

    def _of_ranks(self, amounts: Mapping[str, float]) -> NDArray[np.float64]:
        found = np.zeros(self.ranks)
        for name, amount in amounts.items():
            place, rows = self[name], self.sizes[name].rows
            if isinstance(place, int):
                found[place] += amount
            elif place == EVERYWHERE:
                found += amount
            elif rows:
                size = Blocks(rows, self.ranks).size
                found += amount / rows * np.clip(rows - size * np.arange(self.ranks), 0, size)
        return found

    def bytes_per_step(self) -> float:
        """Bytes that a rank sends to others for one lookup of all tables and its backward pass, on average.

        See ``docs/scaling.md``, and ``rowstep.distributed.bytes_per_step`` for a single table.
        """
        others, used = self.ranks - 1, 0.0
        for name, (_, width, element) in self.sizes.items():
            if self[name] == EVERYWHERE:
                used += others * self.use[name].distinct * (_INDEX + width * element)
            else:
                used += others / self.ranks * self.use[name].distinct * (_INDEX + 2 * width * element)
        return used + others * MEETINGS

    def balance(self) -> Balance:
        """How evenly ranks are loaded, as far as can be expected."""
        return Balance(_over_mean(self.bytes_of_ranks()), _over_mean(self.load_of_ranks()))

    def __str__(self) -> str:
        lines = [("table", "rows", "width", "MB", "ids per step", "distinct", "place")]
        for name, place in self.items():
            size, use = self.sizes[name], self.use[name]
            where = f"on rank {place}" if isinstance(place, int) else place
            numbers = (f"{size.rows:,}", str(size.width), f"{size.bytes / 1e6:,.2f}", f"{use.ids:,.0f}")
            lines.append((name, *numbers, f"{use.distinct:,.0f}", where))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        rows = [
            "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:-1], widths[1:-1]), line[-1]]) for line in lines
        ]
        by_bytes, by_load = self.balance()
        ranks = f"{self.ranks} rank{'s' * (self.ranks > 1)}"
        summary = (
            f"the fullest has {by_bytes:.2f} times the mean bytes, the busiest {by_load:.2f} times the mean traffic"
        )
        return "\n".join([*rows, f"{ranks}; with these ids, {summary}"])

    __repr__ = __str__


def plan_tables(
    tables: Mapping[str, nn.Module | tuple[int, ...]],
    ranks: int,
    *,
    ids: float | Mapping[str, float] = _USUAL_IDS,
    popularity: float | Mapping[str, float | Tensor] = _USUAL_EXPONENT,
    use: Mapping[str, Use] | None = None,
    fixed: Mapping[str, Place] | None = None,
) -> Plan:
    """Place tables so that every rank has about the same memory and traffic, at the least cost.

    A table is put on one rank if its share of memory and of traffic is small enough to be balanced by others. If not,
    it is divided by rows; or, with too few rows for that, it is put on every rank. How many of n ids are distinct is
    expected from the popularity pᵢ of the rows:

        distinct = Σ 1 - (1 - pᵢ)ⁿ

    Args:
        tables: modules, or rows and width, by name.
        ranks: how many there are.
        ids: how many ids a rank looks up in a table in one step; one number for all, or by name.
        popularity: how often rows are looked up, to tell how many ids are distinct: the exponent of a Zipf distribution
            (0: all rows alike), or a count for each row. One exponent for all tables, or either by name.
        use: what was measured, by name (``ShardedEmbeddingCollection.use()``), in the place of ``ids`` and
            ``popularity``.
        fixed: tables that have their place already.

    Returns:
        The plan.

    Examples:
        >>> from rowstep.distributed import plan_tables
        >>> tables = {"user": (1_000_000, 32), "item": (50_000, 32), "shop": (2_000, 8)}
        >>> plan = plan_tables(tables, ranks=2, ids={"user": 4096, "item": 4096, "shop": 512})
        >>> dict(plan)
        {'user': 'divided', 'item': 'divided', 'shop': 0}
    """
    if isinstance(ranks, bool) or ranks < 1:
        raise ValueError(f"ranks is {ranks}; expected at least 1")
    sizes = {name: Size.of(table) for name, table in tables.items()}
    for name, size in sizes.items():
        if min(size) < 0:
            raise ValueError(f"table {name!r} is {size.rows} x {size.width}; expected no negative size")
    fixed, use = fixed or {}, use or {}
    for what, named in (("fixed", fixed), ("use", use), ("ids", ids), ("popularity", popularity)):
        if isinstance(named, Mapping) and (unknown := [name for name in named if name not in sizes]):
            raise ValueError(f"{what} names {', '.join(map(repr, unknown))}; expected only {', '.join(sizes)}")
    shapes = popularity if isinstance(popularity, Mapping) else dict.fromkeys(sizes, popularity)
    counts = ids if isinstance(ids, Mapping) else dict.fromkeys(sizes, ids)
    expected = {
        name: use.get(name)
        or _expected_use(name, size, counts.get(name, _USUAL_IDS), shapes.get(name, _USUAL_EXPONENT))
        for name, size in sizes.items()
    }
    for name, each in expected.items():
        if not all(math.isfinite(number) and number >= 0 for number in each):
            raise ValueError(f"the use of {name!r} is {tuple(each)}; expected finite numbers, none of them negative")
    share = 1.0
    while True:
        plan = Plan(sizes, ranks, expected, {name: fixed.get(name, DIVIDED) for name in sizes})
        _pack(plan, set(sizes) - set(fixed), share)
        if max(plan.balance()) <= BALANCED or share < 1e-4:
            return plan
        share *= _SHARE_FACTOR


def _pack(plan: Plan, free: set[str], share: float) -> None:
    """Put tables on one rank each, the largest first, unless they are more than this share of a rank's."""
    ranks = plan.ranks
    mean_bytes = sum(size.bytes for size in plan.sizes.values()) / ranks or 1
    mean_load = sum(map(plan._load, plan)) / ranks or 1
    weight = {name: (plan.sizes[name].bytes / mean_bytes, plan._load(name) / mean_load) for name in plan}
    small = [name for name in plan if name in free and max(weight[name]) <= share]
    for name in free - set(small):
        plan[name] = DIVIDED if plan.sizes[name].rows >= _ROWS_PER_RANK * ranks else EVERYWHERE
    placed = [name for name in plan if name not in set(small)]
    by_bytes = plan._of_ranks({name: plan.sizes[name].bytes for name in placed}) / mean_bytes
    by_load = plan._of_ranks({name: plan._load(name) for name in placed}) / mean_load
    for name in sorted(small, key=lambda name: max(weight[name]), reverse=True):
        own_bytes, own_load = weight[name]
        rank = int(np.argmin(np.maximum(by_bytes + own_bytes, by_load + own_load)))
        plan[name] = rank
        by_bytes[rank] += own_bytes
        by_load[rank] += own_load


def _expected_use(name: str, size: Size, ids: float, popularity: float | Tensor) -> Use:
    """How many of a rank's ids are distinct: each row is missed with probability (1 - p)^ids."""
    if not ids >= 0:
        raise ValueError(f"ids is {ids} for {name!r}; expected 0 or more")
    if isinstance(popularity, Tensor):
        if popularity.shape != (size.rows,):
            raise ValueError(
                f"the popularity has shape {tuple(popularity.shape)}; expected ({size.rows},), one per row"
            )
        weights, rows = popularity.double().cpu(), torch.ones(size.rows, dtype=torch.float64)
        if not bool((weights >= 0).all()):
            raise ValueError(
                f"the popularity of {name!r} has negative numbers or NaN; expected counts, none of them negative"
            )
        if not bool(weights.isfinite().all()):
            raise ValueError(f"the popularity of {name!r} is not finite; expected counts, or a finite exponent")
    elif math.isfinite(popularity):
        weights, rows = _zipf(size.rows, float(popularity))
    else:
        raise ValueError(f"the popularity of {name!r} is not finite; expected counts, or a finite exponent")
    total = float((weights * rows).sum())
    if not total:
        return Use(ids, 0.0)
    chances = (weights / total).clamp(max=1 - 1e-15)
    distinct = float((rows * -torch.expm1(ids * torch.log1p(-chances))).sum())
    return Use(ids, min(distinct, ids))


def _zipf(rows: int, exponent: float) -> tuple[Tensor, Tensor]:
    """Weights of a Zipf distribution, and how many rows have each: the first ones one by one, the rest in bins.

    Distinct ids are off by less than 0.01%. Of 2,048 numbers or more torch shares the work with other threads, and
    waits for them: beside other work, a plan of 800 tables then took up to 8 s in the place of 0.7 s.
    """
    if not rows:
        return torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.float64)
    head = min(rows, _HEAD)
    edges = torch.logspace(math.log10(head + 1), math.log10(rows + 1), _BINS, dtype=torch.float64)
    edges = torch.unique(edges.round())
    starts = torch.cat([torch.arange(1, head + 1, dtype=torch.float64), edges[:-1]])
    counts = torch.cat([torch.ones(head, dtype=torch.float64), edges.diff()])
    return (starts + (counts - 1) / 2).pow(-exponent), counts


def _over_mean(amounts: NDArray[np.float64]) -> float:
    mean = float(amounts.mean())
    return float(amounts.max()) / mean if mean else 1.0

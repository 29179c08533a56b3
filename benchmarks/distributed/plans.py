"""How even a plan turns out for models with many tables: simulated, for more ranks than a machine has.

Every rank draws ids, and it is counted which rows each rank really holds and is really asked for. The plan is told how
many ids there are and how popular rows are, as one that was made from measured use. Ids are sorted by popularity, as
those of a vocabulary are: nothing but the order of rows spreads the popular ones.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from rowstep.distributed import Plan, Size, plan_tables
from rowstep.distributed._placement import DIVIDED, EVERYWHERE, Placement

# Distinct values of the 26 categorical features of the Criteo click logs.
CRITEO = (
    *(45_833_188, 36_746, 17_245, 7_413, 20_243, 3, 7_114, 1_441, 62, 29_275_261, 1_572_176, 345_138, 10),
    *(2_209, 11_267, 128, 4, 974, 14, 48_937_457, 11_316_796, 40_094_537, 452_104, 12_606, 104, 35),
)
CRITEO_WIDTH, CRITEO_IDS, CRITEO_EXPONENT = 16, 2_048, 1.05

WIDTHS, LARGEST_EXPONENT = (8, 16, 32, 64), 1.2
FEWEST_ROWS, MOST_ROWS, FEWEST_IDS, MOST_IDS = 10, 10**7, 16, 8_192
INDEX = 4  # bytes of a row number on its way


class Used(NamedTuple):
    """A table, and what a rank looks up in it in one step."""

    size: Size
    ids: int
    exponent: float  # of the Zipf distribution that ids are drawn from; 0: uniform


@dataclass(frozen=True)
class Planned:
    about: str
    ranks: int
    seconds: float  # that planning took
    places: dict[str, int]  # how many tables are on one rank, divided or everywhere
    bytes: float  # of weights that the fullest rank holds, over the mean
    load: float  # bytes that the busiest rank sends and receives as an owner, over the mean: average of steps
    expected_bytes: float  # what the plan says of them
    expected_load: float


def simulate(counts: tuple[int, ...], many: int, steps: int) -> Iterator[Planned]:
    """For the tables of a well-known data set, and for so many tables of all sizes."""
    for about, tables in ((f"{len(CRITEO)} tables of Criteo", criteo()), (f"{many} tables of all sizes", mixed(many))):
        for ranks in counts:
            yield _planned(about, tables, ranks, steps)


def criteo() -> dict[str, Used]:
    used = [Used(Size(rows, CRITEO_WIDTH), CRITEO_IDS, CRITEO_EXPONENT) for rows in CRITEO]
    return {f"C{number}": one for number, one in enumerate(used, start=1)}


def mixed(count: int) -> dict[str, Used]:
    rng = np.random.default_rng(0)
    drawn = zip(
        np.exp(rng.uniform(np.log(FEWEST_ROWS), np.log(MOST_ROWS), count)).astype(int).tolist(),
        rng.choice(WIDTHS, count).tolist(),
        np.exp(rng.uniform(np.log(FEWEST_IDS), np.log(MOST_IDS), count)).astype(int).tolist(),
        rng.uniform(0, LARGEST_EXPONENT, count).tolist(),
        strict=True,
    )
    return {f"table {n}": Used(Size(rows, width), ids, s) for n, (rows, width, ids, s) in enumerate(drawn)}


def _planned(about: str, tables: Mapping[str, Used], ranks: int, steps: int) -> Planned:
    start = time.perf_counter()
    plan = plan_tables(
        {name: used.size for name, used in tables.items()},
        ranks,
        ids={name: used.ids for name, used in tables.items()},
        popularity={name: used.exponent for name, used in tables.items()},
    )
    seconds = time.perf_counter() - start
    places = Counter(place if isinstance(place, str) else "on one rank" for place in plan.values())
    reached = (_over_mean(held(plan)), _over_mean(load(plan, tables, steps)))
    return Planned(about, ranks, seconds, dict(places), *reached, *plan.balance())


def held(plan: Plan) -> NDArray[np.float64]:
    """Bytes of weights on each rank."""
    found = np.zeros(plan.ranks)
    for name, size in plan.sizes.items():
        placement = Placement(size.rows, plan.ranks, plan[name])
        rows = np.array([len(placement.of(rank)) for rank in range(plan.ranks)])
        found += rows * size.width * size.element
    return found


def load(plan: Plan, tables: Mapping[str, Used], steps: int) -> NDArray[np.float64]:
    """Bytes that each rank sends and receives as an owner of rows, in so many steps."""
    rng = np.random.Generator(np.random.SFC64(1))
    found = np.zeros(plan.ranks)
    for name, used in tables.items():
        placement = Placement(used.size.rows, plan.ranks, plan[name])
        row = used.size.width * used.size.element
        # Rows go to those who ask, and gradients come back; where everybody has the rows, only gradients travel.
        size = INDEX + (row if placement.place == EVERYWHERE else 2 * row)
        cumulative, edges = _zipf(used.size.rows, used.exponent)
        for _ in range(steps):
            draws = np.sort(rng.random((plan.ranks, used.ids)), axis=1)
            found += size * _asked(placement, np.interp(draws, cumulative, edges).astype(np.int64))
    return found


def _asked(placement: Placement, ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """How many rows each rank is asked for; each asks for a row once. There is a sorted line of ids for each rank."""
    is_new = np.ones(ids.shape, dtype=bool)
    np.not_equal(ids[:, 1:], ids[:, :-1], out=is_new[:, 1:])
    if placement.place == DIVIDED:
        owners = placement.order.positions(torch.from_numpy(ids[is_new])) // placement.span
        return np.bincount(owners.numpy(), minlength=placement.ranks).astype(np.float64)
    has_rows = [len(placement.of(rank)) > 0 for rank in range(placement.ranks)]
    return np.array(has_rows, dtype=np.float64) * float(is_new.sum())


def _zipf(rows: int, exponent: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Zipf's law added up, and the ids at which it was: one by one at first, then in bins 1% wide.

    The popularity of each of 49 million rows would take half a second per table to add up, and the cache besides.
    """
    head = np.arange(min(rows, 1_000) + 1, dtype=np.float64)
    bins = np.unique(np.geomspace(head[-1], rows, 1_000).round())
    edges = np.concatenate([head, bins[1:]])
    weights = ((edges[:-1] + edges[1:] + 1) / 2) ** -exponent * np.diff(edges)
    return np.concatenate([[0], np.cumsum(weights) / weights.sum()]), edges


def _over_mean(amounts: NDArray[np.float64]) -> float:
    return float(amounts.max() / amounts.mean())

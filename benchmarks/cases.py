"""Which tables are stepped, and the gradients they get."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

POOL = 6  # batches that are taken in turn, so that no contender meets rows it has just touched


@dataclass(frozen=True)
class Case:
    name: str
    rows: int
    dim: int
    ids: int  # of one table, in one batch
    zipf: bool = False
    tables: int = 1
    bag: int = 0  # ids per bag; 0: no bags
    distinct: bool = False  # ids of a batch
    batches: int = POOL  # different ones, so that rows wait as long as they do in training

    @property
    def about(self) -> str:
        many = f"{self.tables} tables of " if self.tables > 1 else ""
        kind = "Zipf" if self.zipf else "distinct" if self.distinct else "uniform"
        ids = f"{self.ids:,} {kind} ids"
        if self.bag:
            each = " each" * (self.tables > 1)
            ids = f"{self.ids // self.bag:,} bags of {self.bag} {kind} id{'s' * (self.bag > 1)}{each}"
        waiting = f", {self.batches} batches" * (self.batches != POOL)
        return f"{many}{self.size}, {ids}{waiting}"

    @property
    def size(self) -> str:
        return f"{short(self.rows)} x {self.dim}"

    @property
    def weights(self) -> int:
        return self.tables * self.rows * self.dim


ZIPF = Case("zipf-1m", 1_000_000, 64, 65_536, zipf=True)
UNIFORM = Case("uniform-1m", 1_000_000, 64, 65_536)
LONG = Case("uniform-10m", 10_000_000, 32, 16_384)
SMALL = Case("uniform-100k", 100_000, 16, 4_096)
MANY = Case("26-tables", 100_000, 16, 2_048, tables=26)
# For quick runs:
TINY_ZIPF = Case("zipf-20k", 20_000, 16, 4_096, zipf=True)
TINY_UNIFORM = Case("uniform-20k", 20_000, 16, 4_096)
TINY_MANY = Case("3-tables", 5_000, 16, 512, tables=3)


def short(count: int) -> str:
    """1000000 as 1M, 20000 as 20k."""
    for size, letter in ((1_000_000, "M"), (1_000, "k")):
        if count % size == 0:
            return f"{count // size}{letter}"
    return f"{count:,}"


def batches_of_ids(case: Case) -> list[list[Tensor]]:
    """Each with the ids of every table."""
    rng = np.random.default_rng(0)
    popular = popularity(case.rows) if case.zipf else None

    def draw() -> NDArray[np.int64]:
        if case.distinct:
            return rng.choice(case.rows, case.ids, replace=False)
        if popular is None:
            return rng.integers(0, case.rows, case.ids)
        # Frequent rows lie scattered, as hashed ids do: a stride that is prime to the rows is a permutation of them.
        return popular.searchsorted(rng.random(case.ids)) * 7_368_787 % case.rows

    return [[torch.from_numpy(draw()) for _ in range(case.tables)] for _ in range(case.batches)]


def popularity(rows: int) -> NDArray[np.float64]:
    """Zipf's law, added up: a number drawn from 0 to 1 belongs to the row at whose place it would be inserted."""
    cumulative: NDArray[np.float64] = np.cumsum(1 / np.arange(1, rows + 1))
    cumulative /= cumulative[-1]
    return cumulative


def values(case: Case) -> Iterator[list[Tensor]]:
    """Of the gradients of POOL batches: (ids or bags, dim) for every table.

    Multiples of 1/64: sums of duplicates are then exact in any order, and results can be compared closely.
    """
    generator, count = torch.Generator().manual_seed(0), case.ids // max(1, case.bag)
    for _ in range(min(case.batches, POOL)):
        drawn = [torch.randn(count, case.dim, generator=generator) for _ in range(case.tables)]
        yield [each.mul_(64).round_().div_(64) for each in drawn]


def gradients(case: Case) -> list[list[Tensor]]:
    """Uncoalesced, as nn.Embedding(sparse=True) makes them.

    Every POOL batches the values come again, with other ids: hundreds of batches would not fit into memory.
    """
    pool = list(values(case))
    return [
        [gradient(case, *pair) for pair in zip(batch, pool[number % POOL], strict=True)]
        for number, batch in enumerate(batches_of_ids(case))
    ]


def gradient(case: Case, ids: Tensor, rows: Tensor) -> Tensor:
    return torch.sparse_coo_tensor(ids.unsqueeze(0), rows, (case.rows, case.dim), check_invariants=False)


def parameters(case: Case) -> list[nn.Parameter]:
    """The same weights at every call. A random block is repeated: drawing 320 million numbers takes seconds."""
    block = torch.randn(min(case.rows, 10_000), case.dim, generator=torch.Generator().manual_seed(1))
    copies = -(-case.rows // len(block))
    return [nn.Parameter(block.repeat(copies, 1)[: case.rows]) for _ in range(case.tables)]

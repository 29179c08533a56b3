"""Which tables are stepped, and the gradients they get."""

from __future__ import annotations

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
    ids: int
    zipf: bool = False
    tables: int = 1

    @property
    def about(self) -> str:
        many = f"{self.tables} tables of " if self.tables > 1 else ""
        kind = "Zipf" if self.zipf else "uniform"
        return f"{many}{short(self.rows)} x {self.dim}, {self.ids:,} {kind} ids"

    @property
    def weights(self) -> int:
        return self.tables * self.rows * self.dim


@dataclass(frozen=True)
class Sizes:
    """All that a run of the suite measures."""

    steps: tuple[Case, ...]
    scaling: tuple[Case, Case]  # few rows, many rows
    loops: tuple[Case, ...]
    dense_rows: int
    memory_rows: tuple[int, ...]
    memory_ids: int


ZIPF = Case("zipf-1m", 1_000_000, 64, 65_536, zipf=True)
UNIFORM = Case("uniform-1m", 1_000_000, 64, 65_536)
LONG = Case("uniform-10m", 10_000_000, 32, 16_384)
SMALL = Case("uniform-100k", 100_000, 16, 4_096)
MANY = Case("26-tables", 100_000, 16, 2_048, tables=26)

FULL = Sizes(
    steps=(ZIPF, UNIFORM, LONG, SMALL, MANY),
    scaling=(Case("1m-rows", 1_000_000, 32, 16_384), LONG),
    loops=(ZIPF, UNIFORM),
    dense_rows=1_000_000,
    memory_rows=(100_000, 1_000_000, 4_000_000),
    memory_ids=65_536,
)
QUICK = Sizes(
    steps=(
        Case("zipf-20k", 20_000, 16, 4_096, zipf=True),
        Case("uniform-20k", 20_000, 16, 4_096),
        Case("3-tables", 5_000, 16, 512, tables=3),
    ),
    scaling=(Case("20k-rows", 20_000, 16, 2_048), Case("200k-rows", 200_000, 16, 2_048)),
    loops=(Case("zipf-20k", 20_000, 16, 4_096, zipf=True),),
    dense_rows=20_000,
    memory_rows=(20_000,),
    memory_ids=16_384,
)


def short(count: int) -> str:
    """1000000 as 1M, 20000 as 20k."""
    for size, letter in ((1_000_000, "M"), (1_000, "k")):
        if count % size == 0:
            return f"{count // size}{letter}"
    return f"{count:,}"


def batches_of_ids(case: Case) -> list[list[Tensor]]:
    """POOL batches, each with the ids of every table."""
    rng = np.random.default_rng(0)
    if case.zipf:
        cumulative = np.cumsum(1 / np.arange(1, case.rows + 1))
        cumulative /= cumulative[-1]

    def draw() -> NDArray[np.int64]:
        if not case.zipf:
            return rng.integers(0, case.rows, case.ids)
        rank = np.searchsorted(cumulative, rng.random(case.ids))
        # Frequent rows lie scattered, as hashed ids do: a stride that is prime to the rows is a permutation of them.
        return rank * 7_368_787 % case.rows

    return [[torch.from_numpy(draw()) for _ in range(case.tables)] for _ in range(POOL)]


def gradients(case: Case) -> list[list[Tensor]]:
    """Uncoalesced, as nn.Embedding(sparse=True) makes them.

    Values are multiples of 1/64: sums of duplicates are then exact in any order, and results can be compared closely.
    """
    generator = torch.Generator().manual_seed(0)

    def gradient(ids: Tensor) -> Tensor:
        values = torch.randn(case.ids, case.dim, generator=generator).mul_(64).round_().div_(64)
        return torch.sparse_coo_tensor(ids.unsqueeze(0), values, (case.rows, case.dim), check_invariants=False)

    return [[gradient(ids) for ids in batch] for batch in batches_of_ids(case)]


def parameters(case: Case) -> list[nn.Parameter]:
    """The same weights at every call. A random block is repeated: drawing 320 million numbers takes seconds."""
    block = torch.randn(min(case.rows, 10_000), case.dim, generator=torch.Generator().manual_seed(1))

    def weights() -> Tensor:
        table = torch.empty(case.rows, case.dim)
        for start in range(0, case.rows, len(block)):
            part = table[start : start + len(block)]
            part.copy_(block[: len(part)])
        return table

    return [nn.Parameter(weights()) for _ in range(case.tables)]

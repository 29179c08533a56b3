"""What the suite `sparse` measures."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.cases import LONG, MANY, SMALL, UNIFORM, ZIPF, Case


@dataclass(frozen=True)
class Sizes:
    """All that a run of the suite measures."""

    steps: tuple[Case, ...]
    scaling: tuple[Case, Case]  # few rows, many rows
    loops: tuple[Case, ...]
    dense_rows: int
    memory_rows: tuple[int, ...]
    memory_ids: int


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

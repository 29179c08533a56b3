"""What the suite `peers` measures."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.cases import LONG, MANY, UNIFORM, ZIPF, Case, short


@dataclass(frozen=True)
class Bags:
    """A case of the whole loop: so many tables, each looked up for so many bags of ids."""

    name: str
    rows: int
    dim: int
    bags: int
    size: int
    zipf: bool = False
    tables: int = 1

    @property
    def about(self) -> str:
        many = f"{self.tables} tables of " if self.tables > 1 else ""
        kind = "Zipf" if self.zipf else "uniform"
        ids = f"{self.bags:,} bags of {self.size} {kind} id{'s' * (self.size > 1)}"
        return f"{many}{short(self.rows)} x {self.dim}, {ids}{' each' * (self.tables > 1)}"

    @property
    def case(self) -> Case:
        return Case(self.name, self.rows, self.dim, self.bags * self.size, self.zipf, self.tables)

    @property
    def weights(self) -> int:
        return self.case.weights


@dataclass(frozen=True)
class Curve:
    """A case of which one number is varied: rows, ids, width, or how often each id occurs."""

    axis: str
    label: str
    case: Case
    values: tuple[int, ...]


@dataclass(frozen=True)
class Sizes:
    steps: tuple[Case, ...]
    loops: tuple[Bags, ...]
    curves: tuple[Curve, ...]


ROWS, IDS, WIDTH, DUPLICATES, THREADS = "rows", "ids", "width", "duplicates", "threads"
LABELS = {
    ROWS: "rows of the table",
    IDS: "ids of a step",
    WIDTH: "width of a row",
    DUPLICATES: "occurrences of each id",
    THREADS: "threads",
}


def _powers(base: int, first: int, last: int) -> tuple[int, ...]:
    return tuple(base**exponent for exponent in range(first, last + 1))


FULL = Sizes(
    steps=(ZIPF, UNIFORM, LONG, MANY),
    loops=(
        Bags("bags-zipf-1m", 1_000_000, 64, 4_096, 16, zipf=True),
        Bags("bags-uniform-1m", 1_000_000, 64, 4_096, 16),
        Bags("bags-26-tables", 100_000, 16, 2_048, 1, tables=26),
        Bags("bags-8-tables", 1_000_000, 32, 1_024, 20, tables=8),
    ),
    curves=(
        # Narrow, so that 10^8 rows with both moments take 9.6 GB.
        Curve(ROWS, "width 8, 16,384 uniform ids", Case("rows", 0, 8, 16_384), _powers(10, 4, 8)),
        Curve(IDS, "1M x 32, uniform ids", Case("ids", 1_000_000, 32, 0), _powers(4, 4, 10)),
        Curve(WIDTH, "1M rows, 16,384 uniform ids", Case("width", 1_000_000, 0, 16_384), _powers(2, 2, 8)),
        Curve(DUPLICATES, "1M x 64, 65,536 ids", Case("duplicates", 1_000_000, 64, 65_536), _powers(4, 0, 5)),
        Curve(THREADS, "1M x 64, 65,536 uniform ids", UNIFORM, ()),
    ),
)  # fmt: skip
QUICK = Sizes(
    steps=(
        Case("zipf-20k", 20_000, 16, 4_096, zipf=True),
        Case("3-tables", 5_000, 16, 512, tables=3),
    ),
    loops=(
        Bags("bags-zipf-20k", 20_000, 16, 256, 8, zipf=True),
        Bags("bags-3-tables", 5_000, 16, 512, 1, tables=3),
    ),
    curves=(
        Curve(ROWS, "width 8, 2,048 uniform ids", Case("rows", 0, 8, 2_048), (1_000, 10_000)),
        Curve(IDS, "20k x 16, uniform ids", Case("ids", 20_000, 16, 0), (256, 1_024)),
        Curve(WIDTH, "20k rows, 2,048 uniform ids", Case("width", 20_000, 0, 2_048), (4, 16)),
        Curve(DUPLICATES, "20k x 16, 2,048 ids", Case("duplicates", 20_000, 16, 2_048), (1, 4)),
        Curve(THREADS, "20k x 16, 2,048 uniform ids", Case("threads", 20_000, 16, 2_048), ()),
    ),
)  # fmt: skip

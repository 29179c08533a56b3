"""What every contestant of a case is given: the same ids, gradients and weights, in files that all of them can read.

The driver writes them with `benchmarks.cases`; workers, which may have no torch, read them with NumPy.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

BLOCK = 10_000  # rows of random weights, repeated to the end of a table: drawing 320 million numbers takes seconds


@dataclass(frozen=True)
class Data:
    rows: int
    dim: int
    ids: NDArray[np.int64]  # (batches, tables, ids); in bags of `bag` ids, if it is not 0
    values: NDArray[np.float32]  # (batches, tables, ids or bags, dim), the gradient
    block: NDArray[np.float32]  # (at most BLOCK, dim)
    threads: int
    bag: int = 0

    @property
    def tables(self) -> int:
        return len(self.ids[0])

    @property
    def batches(self) -> int:
        return len(self.ids)

    def weights(self) -> NDArray[np.float32]:
        """The weights every table starts with."""
        return np.resize(self.block, (self.rows, self.dim))

    def weights_of(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        taken: NDArray[np.float32] = self.block[rows % len(self.block)]
        return taken

    def summed(self, batch: int, table: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The distinct rows of a batch, ascending, and the sum of each one's gradients."""
        ids, values = self.ids[batch, table], self.values[batch, table]
        if self.bag:
            values = values.repeat(self.bag, axis=0)
        order = np.argsort(ids, kind="stable")
        rows, starts = np.unique(ids[order], return_index=True)
        return rows, np.add.reduceat(values[order], starts, axis=0)

    def write(self, folder: Path) -> None:
        for name in ("ids", "values", "block"):
            np.save(folder / f"{name}.npy", getattr(self, name))
        (folder / "case.json").write_text(json.dumps({"rows": self.rows, "dim": self.dim, "bag": self.bag}))

    @classmethod
    def read(cls, folder: Path, threads: int) -> Data:
        arrays = {name: np.load(folder / f"{name}.npy") for name in ("ids", "values", "block")}
        return cls(**json.loads((folder / "case.json").read_text()), **arrays, threads=threads)

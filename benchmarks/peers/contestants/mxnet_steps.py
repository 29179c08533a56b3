"""MXNet's adam_update with lazy_update=True. It wants distinct, sorted rows: summing duplicates is not counted."""

from __future__ import annotations

import math
from typing import Any

import mxnet  # type: ignore[import-not-found]
import numpy as np
from numpy.typing import NDArray

from benchmarks.peers.data import Data


class LazyAdam:
    def __init__(self, data: Data) -> None:
        shape = (data.rows, data.dim)
        self.tables = [
            (mxnet.nd.array(data.weights()), mxnet.nd.zeros(shape), mxnet.nd.zeros(shape)) for _ in data.ids[0]
        ]
        self.gradients = [
            [self._gradient(*data.summed(batch, table), shape) for table in range(data.tables)]
            for batch in range(data.batches)
        ]
        mxnet.nd.waitall()
        self.batch = self.gradients[0]
        self.steps = 0

    def _gradient(self, rows: NDArray[np.int64], values: NDArray[np.float32], shape: tuple[int, int]) -> Any:
        return mxnet.nd.sparse.row_sparse_array((values, rows), shape=shape)

    def prepare(self, number: int) -> None:
        self.batch = self.gradients[number % len(self.gradients)]
        self.steps += 1

    def run(self) -> None:
        # The operator has no bias correction: MXNet's own optimizer class puts it into the learning rate, like this.
        lr = 1e-3 * math.sqrt(1 - 0.999**self.steps) / (1 - 0.9**self.steps)
        for (p, m, v), gradient in zip(self.tables, self.batch, strict=True):
            mxnet.nd.adam_update(
                p, gradient, m, v, lr=lr, beta1=0.9, beta2=0.999, epsilon=1e-8, wd=0.0, lazy_update=True, out=p
            )
        mxnet.nd.waitall()  # its operators run in the background

    def state(self, table: int, rows: NDArray[np.int64]) -> dict[str, NDArray[np.float32]]:
        taken = mxnet.nd.array(rows, dtype="int64")
        names = ("weights", "first", "second")
        return {
            name: mxnet.nd.take(array, taken).asnumpy() for name, array in zip(names, self.tables[table], strict=True)
        }

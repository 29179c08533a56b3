"""PaddlePaddle's Adam with lazy_mode=True, which updates only the rows of a sparse gradient."""

from __future__ import annotations

import numpy as np
import paddle  # type: ignore[import-not-found]
from numpy.typing import NDArray

from benchmarks.peers.data import Data


class LazyAdam:
    def __init__(self, data: Data) -> None:
        paddle.set_device("cpu")
        zeros = paddle.ParamAttr(initializer=paddle.nn.initializer.Constant(0.0))
        self.layers = [paddle.nn.Embedding(data.rows, data.dim, sparse=True, weight_attr=zeros) for _ in data.ids[0]]
        for layer in self.layers:
            layer.weight.set_value(data.weights())
        self.ids = [[paddle.to_tensor(ids) for ids in batch] for batch in data.ids]
        self.values = [[paddle.to_tensor(values) for values in batch] for batch in data.values]
        params = [layer.weight for layer in self.layers]
        self.optimizer = paddle.optimizer.Adam(1e-3, parameters=params, lazy_mode=True)

    def prepare(self, number: int) -> None:
        """Only a backward pass makes sparse gradients here."""
        self.optimizer.clear_grad()
        batch = zip(self.layers, self.ids[number % len(self.ids)], self.values[number % len(self.ids)], strict=True)
        for layer, ids, values in batch:
            layer(ids).backward(values)

    def run(self) -> None:
        self.optimizer.step()

    def state(self, table: int, rows: NDArray[np.int64]) -> dict[str, NDArray[np.float32]]:
        weight = self.layers[table].weight
        kept = self.optimizer.state_dict()
        found = {
            "weights": weight,
            "first": kept[f"{weight.name}_moment1_0"],
            "second": kept[f"{weight.name}_moment2_0"],
        }
        return {name: paddle.index_select(tensor, paddle.to_tensor(rows)).numpy() for name, tensor in found.items()}

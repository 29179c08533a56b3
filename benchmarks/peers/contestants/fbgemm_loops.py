"""The whole loop with FBGEMM's table-batched embeddings, whose backward pass updates the tables."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType  # type: ignore[import-not-found]
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (  # type: ignore[import-not-found]
    ComputeDevice,
    EmbeddingLocation,
    PoolingMode,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from numpy.typing import NDArray

from benchmarks.peers.data import Data


class Bags:
    def __init__(self, data: Data, kind: EmbOptimType) -> None:
        torch.set_num_threads(data.threads)
        self.module = SplitTableBatchedEmbeddingBagsCodegen(
            [(data.rows, data.dim, EmbeddingLocation.HOST, ComputeDevice.CPU)] * data.tables,
            optimizer=kind,
            learning_rate=1e-3,
            eps=1e-8,
            pooling_mode=PoolingMode.SUM,
        )
        for table in self.module.split_embedding_weights():
            table.copy_(torch.from_numpy(data.weights()))
        self.ids = [torch.from_numpy(batch).flatten() for batch in data.ids]
        self.offsets = torch.arange(0, self.ids[0].numel() + 1, data.bag)
        # (bags, tables * dim): it puts the outputs of all tables side by side
        self.values = [torch.from_numpy(batch).transpose(0, 1).flatten(1) for batch in data.values]
        self.number = 0

    def prepare(self, number: int) -> None:
        self.number = number % len(self.ids)

    def run(self) -> None:
        self.module(self.ids[self.number], self.offsets).backward(self.values[self.number])

    def state(self, table: int, rows: NDArray[np.int64]) -> dict[str, NDArray[np.float32]]:
        return {"weights": self.module.split_embedding_weights()[table][rows].numpy()}


RowwiseAdagrad = partial(Bags, kind=EmbOptimType.EXACT_ROWWISE_ADAGRAD)
Adagrad = partial(Bags, kind=EmbOptimType.EXACT_ADAGRAD)

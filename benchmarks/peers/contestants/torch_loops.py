"""The whole loop with nn.EmbeddingBag: forward pass, backward pass and step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks.peers.data import Data


class Loop:
    def __init__(self, data: Data, make: Callable[[Iterable[Tensor]], torch.optim.Optimizer]) -> None:
        torch.set_num_threads(data.threads)
        self.tables = [torch.from_numpy(data.weights()) for _ in data.ids[0]]
        make_bag = partial(nn.EmbeddingBag.from_pretrained, freeze=False, mode="sum", sparse=True)
        self.bags = nn.ModuleList(map(make_bag, self.tables))
        bags_of_ids = data.ids.reshape(*data.ids.shape[:2], -1, data.bag)
        self.ids = [list(batch) for batch in torch.from_numpy(bags_of_ids)]
        self.values = [list(batch) for batch in torch.from_numpy(data.values)]
        self.optimizer = make(self.bags.parameters())
        self.number = 0

    def prepare(self, number: int) -> None:
        self.number = number % len(self.ids)

    def run(self) -> None:
        self.optimizer.zero_grad()
        outputs = [bag(ids) for bag, ids in zip(self.bags, self.ids[self.number], strict=True)]
        torch.autograd.backward(outputs, self.values[self.number])
        self.optimizer.step()

    def state(self, table: int, rows: NDArray[np.int64]) -> dict[str, NDArray[np.float32]]:
        return {"weights": self.tables[table][rows].numpy()}


SparseAdam = partial(Loop, make=torch.optim.SparseAdam)

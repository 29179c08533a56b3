"""The step alone with rowstep."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.peers.contestants.torch_steps import Stepper
from benchmarks.peers.data import Data
from rowstep import DeferredAdam, SparseAdam


class Rowstep(Stepper):
    def __init__(self, data: Data) -> None:
        super().__init__(data, SparseAdam)


class Factored(Stepper):
    """Ember's rule: the same result as its dense update at the cost of the rows touched."""

    optimizer: DeferredAdam

    def __init__(self, data: Data) -> None:
        super().__init__(data, lambda params: DeferredAdam(params, betas=(0.0, 0.999), second_moment="factored"))
        self.ids = [list(batch) for batch in torch.from_numpy(data.ids)]
        self.batch = self.ids[0]

    def prepare(self, number: int) -> None:
        super().prepare(number)
        self.batch = self.ids[number % len(self.ids)]

    def run(self) -> None:
        for param, rows in zip(self.params, self.batch, strict=True):
            self.optimizer.catch_up(param, rows)  # what a lookup does
        self.optimizer.step()

    def state(self, table: int, rows: NDArray[np.int64]) -> dict[str, NDArray[np.float32]]:
        return {"weights": self.params[table].detach()[rows].numpy()}

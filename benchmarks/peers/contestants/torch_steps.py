"""The step alone with torch: its own optimizers, and rules written in its operations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks.peers.data import Data

Maker: TypeAlias = Callable[[Sequence[Tensor]], torch.optim.Optimizer]

LR, BETA1, BETA2, EPS = 1e-3, 0.9, 0.999, 1e-8


class Tables:
    """The tables of a case as parameters, with an optimizer of torch's kind, if any is to step them."""

    def __init__(self, data: Data, make: Maker | None = None) -> None:
        torch.set_num_threads(data.threads)
        self.params = [nn.Parameter(torch.from_numpy(data.weights())) for _ in range(data.tables)]
        self.optimizer: Any = make(self.params) if make else None
        self.kept: Any = self.optimizer.state if self.optimizer else {}

    def run(self) -> None:
        self.optimizer.step()

    def state(self, table: int, rows: NDArray[np.int64]) -> dict[str, NDArray[np.float32]]:
        param = self.params[table]
        kept = self.kept.get(param, {})
        found = {"weights": param, "first": kept.get("exp_avg"), "second": kept.get("exp_avg_sq")}
        return {name: tensor.detach()[rows].numpy() for name, tensor in found.items() if isinstance(tensor, Tensor)}


class Sparse(Tables):
    """The gradients of all batches are sparse, and uncoalesced, as nn.Embedding(sparse=True) makes them."""

    def __init__(self, data: Data, make: Maker | None = None) -> None:
        super().__init__(data, make)
        self.gradients = [_gradients(data, batch) for batch in range(data.batches)]

    def prepare(self, number: int) -> None:
        for param, gradient in zip(self.params, self.gradients[number % len(self.gradients)], strict=True):
            param.grad = gradient


class Dense(Tables):
    """The gradient is dense, as nn.Embedding makes it by default; making it is not counted.

    It is that of the first batch. A dense step takes as long with any other, so this one serves for all.
    """

    def __init__(self, data: Data, make: Maker | None = None) -> None:
        super().__init__(data, make)
        for param, gradient in zip(self.params, _gradients(data, 0), strict=True):
            param.grad = gradient.to_dense()

    def prepare(self, number: int) -> None:
        pass


def _gradients(data: Data, batch: int) -> list[Tensor]:
    pairs = zip(torch.from_numpy(data.ids[batch]), torch.from_numpy(data.values[batch]), strict=True)
    shape = (data.rows, data.dim)
    return [torch.sparse_coo_tensor(ids.unsqueeze(0), rows, shape, check_invariants=False) for ids, rows in pairs]


SparseAdam = partial(Sparse, make=torch.optim.SparseAdam)
FusedAdam = partial(Dense, make=partial(torch.optim.Adam, fused=True))


class DglStyle(Sparse):
    """`unique`, `index_add_`, then Adam on the gathered rows, as DGL's sparse optimizers work.

    DGL averages the gradients of a row and counts steps per row; here they are summed, and steps counted per table, so
    that the result can be compared.
    """

    def __init__(self, data: Data) -> None:
        super().__init__(data)
        names = ("exp_avg", "exp_avg_sq")
        self.kept = {param: {name: torch.zeros(param.shape) for name in names} for param in self.params}
        self.steps = 0

    @torch.no_grad()
    def run(self) -> None:
        self.steps += 1
        size = LR * math.sqrt(1 - BETA2**self.steps) / (1 - BETA1**self.steps)
        for param, moments in self.kept.items():
            gradient, (first, second) = param.grad, moments.values()
            rows, places = torch.unique(gradient._indices()[0], return_inverse=True)
            summed = torch.zeros(len(rows), param.shape[1]).index_add_(0, places, gradient._values())
            m = first[rows].mul_(BETA1).add_(summed, alpha=1 - BETA1)
            v = second[rows].mul_(BETA2).addcmul_(summed, summed, value=1 - BETA2)
            first[rows], second[rows] = m, v
            param[rows] -= m.mul_(size).div_(v.sqrt_().add_(EPS))

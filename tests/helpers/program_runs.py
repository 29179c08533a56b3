"""A program that is run twice: with torch's dense AdamW, and with DeferredAdamW on sparse gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rowstep import DeferredAdamW

ROWS, WIDTH = 40, 3

Make = Callable[..., Optimizer]


class Run:
    """One of the two runs: a table, whether its gradients are sparse, and what to make an optimizer with."""

    def __init__(self, make: Make, sparse: bool) -> None:
        torch.manual_seed(7)
        self.make, self.sparse = make, sparse
        self.table = nn.Embedding(ROWS, WIDTH, sparse=sparse, dtype=torch.float64)
        self.ids, self.sign = torch.Generator().manual_seed(1), 1

    def batch(self, count: int = 5) -> Tensor:
        """Ids of which few are frequent, the same in both runs."""
        share = 1 / torch.arange(1.0, ROWS + 1) ** 1.1
        return torch.multinomial(share, count, replacement=True, generator=self.ids)

    def train(self, model: Callable[[Tensor], Tensor], optimizer: Optimizer, steps: int = 1) -> Tensor:
        """Some steps of a model towards goals that depend on the ids; the last output."""
        for _ in range(steps):
            ids = self.batch()
            out = model(ids)
            optimizer.zero_grad()
            # To and fro: near a goal, gradients are all but 0, and Adam makes whole steps of how they are rounded.
            self.sign = -self.sign
            goal = (ids % 7 + 5 * self.sign).to(out.dtype).view(-1, *[1] * (out.dim() - 1))
            torch.autograd.backward((out - goal).square().mean())
            optimizer.step()
        return out.detach()


def optimizers() -> list[tuple[Make, bool]]:
    def dense(params: Any, **options: Any) -> Optimizer:
        return torch.optim.AdamW(params, **({"lr": 0.05} | options))

    def deferred(params: Any, **options: Any) -> Optimizer:
        return DeferredAdamW(params, **({"lr": 0.05} | options))

    return [(dense, False), (deferred, True)]

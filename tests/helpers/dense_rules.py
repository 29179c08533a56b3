"""The rule with a second moment per row, evaluated densely in float64: every row at every step.

It has nothing in common with the package, and touches all rows of all tables.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class DenseRule:
    """A table that is stepped by hand. With ``only_touched``, SparseAdam's way, other rows keep state and weights."""

    p: Tensor
    only_touched: bool
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled_weight_decay: bool = False
    maximize: bool = False
    bias_correction: str = "global"
    steps: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.p = self.p.detach().double().clone()
        self.m, self.row = torch.zeros_like(self.p), self.p.new_zeros(len(self.p))
        self.row_steps = self.p.new_zeros(len(self.p))

    def step(self, ids: Tensor, values: Tensor) -> None:
        """One step with the gradient ``values[i]`` for row ``ids[i]``."""
        (beta1, beta2), p = self.betas, self.p
        self.steps += 1
        g = torch.zeros_like(p).index_add_(0, ids, values.double())
        touched = torch.zeros(len(p), dtype=torch.bool)
        touched[ids] = True
        moving = touched if self.only_touched else torch.ones_like(touched)
        if self.maximize:
            g = -g
        if self.weight_decay and self.decoupled_weight_decay:
            p[moving] *= 1 - self.lr * self.weight_decay
        elif self.weight_decay:
            g[moving] += self.weight_decay * p[moving]
        self.m[moving] = beta1 * self.m[moving] + (1 - beta1) * g[moving]
        self.row[moving] = beta2 * self.row[moving] + (1 - beta2) * g.square().mean(dim=1)[moving]
        self.row_steps += touched
        t = self.row_steps[moving].unsqueeze(1) if self.bias_correction == "row" else p.new_tensor(self.steps)
        first, second = 1 - beta1**t, 1 - beta2**t
        v = self.row[moving].unsqueeze(1)
        root = v.sqrt() + self.eps if self.only_touched else (v / second).sqrt() + self.eps
        correction = second.sqrt() if self.only_touched else 1.0
        p[moving] -= self.lr * correction / first * self.m[moving] / root

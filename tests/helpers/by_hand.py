"""Adam as its paper writes it, in float64, over the whole table: slow, and with nothing in common with the package."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class AdamByHand:
    """A table that is stepped by hand. Most fields are SparseAdam's options."""

    p: Tensor
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    maximize: bool = False
    weight_decay: float = 0.0
    decoupled_weight_decay: bool = False
    amsgrad: bool = False
    bias_correction: str = "global"
    nonfinite: str = "propagate"
    second_moment: str = "element"
    only_touched: bool = True
    """SparseAdam's way: other rows keep state and weights. Without it, dense Adam's."""

    steps: int = field(default=0, init=False)
    skipped: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.p = self.p.detach().double().clone()
        self.m, self.v_max, self.row_steps = torch.zeros_like(self.p), torch.zeros_like(self.p), [0] * len(self.p)
        self.v = self.p.new_zeros(len(self.p), 1 if self.second_moment == "row" else self.p.shape[1])

    def step(self, ids: Sequence[int] | Tensor, values: Tensor) -> None:
        """One step with the gradient ``values[i]`` for row ``ids[i]``."""
        (beta1, beta2), p, ids = self.betas, self.p, torch.as_tensor(ids, dtype=torch.int64)
        self.steps += 1
        touched = torch.zeros(len(p), dtype=torch.bool).index_fill_(0, ids, True)
        g = torch.zeros_like(p).index_add_(0, ids, values.double())
        if self.nonfinite == "skip":
            self.skipped += int((touched & ~g.isfinite().all(1)).sum())
            touched &= g.isfinite().all(1)
        self.row_steps = [count + int(row) for count, row in zip(self.row_steps, touched, strict=True)]
        rows = touched if self.only_touched else torch.ones_like(touched)
        g = -g[rows] if self.maximize else g[rows]
        if self.decoupled_weight_decay:
            p[rows] -= self.lr * self.weight_decay * p[rows]
        else:
            g = g + self.weight_decay * p[rows]
        square = g.square().mean(1, keepdim=True) if self.second_moment == "row" else g.square()
        self.m[rows] = beta1 * self.m[rows] + (1 - beta1) * g
        self.v[rows] = beta2 * self.v[rows] + (1 - beta2) * square
        self.v_max[rows] = torch.maximum(self.v_max[rows], self.v[rows])
        v = self.v_max[rows] if self.amsgrad else self.v[rows]
        t = p.new_tensor(self.row_steps)[rows, None] if self.bias_correction == "row" else p.new_tensor(self.steps)
        first, second = 1 - beta1**t, 1 - beta2**t
        # SparseAdam adds eps to the root of the second moment before its bias is corrected, Adam after.
        root = (v.sqrt() + self.eps) / second.sqrt() if self.only_touched else (v / second).sqrt() + self.eps
        p[rows] -= self.lr / first * self.m[rows] / root

"""Adam as its paper writes it, in float64, one row at a time: slow, and with nothing in common with the package."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from torch import Tensor

Array = npt.NDArray[np.float64]


@dataclass
class AdamByHand:
    """A table that is stepped by hand. The fields are SparseAdam's options."""

    weights: Tensor
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    maximize: bool = False
    weight_decay: float = 0.0
    decoupled_weight_decay: bool = False
    amsgrad: bool = False
    bias_correction: str = "global"
    nonfinite: str = "propagate"

    steps: int = field(default=0, init=False)
    skipped: int = field(default=0, init=False)
    p: Array = field(init=False)
    m: Array = field(init=False)
    v: Array = field(init=False)
    v_max: Array = field(init=False)
    row_steps: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.p = self.weights.detach().double().numpy().copy()
        self.m, self.v, self.v_max = np.zeros_like(self.p), np.zeros_like(self.p), np.zeros_like(self.p)
        self.row_steps = [0] * len(self.p)

    def step(self, ids: Sequence[int], values: Tensor) -> None:
        """One step with the gradient ``values[i]`` for row ``ids[i]``."""
        self.steps += 1
        sums: dict[int, Array] = {}
        for row, value in zip(ids, values.double().numpy(), strict=True):
            sums[row] = sums[row] + value if row in sums else value
        for row, gradient in sums.items():
            if self.nonfinite == "skip" and not np.isfinite(gradient).all():
                self.skipped += 1
            else:
                self._step_row(row, gradient)

    def _step_row(self, row: int, g: Array) -> None:
        beta1, beta2 = self.betas
        self.row_steps[row] += 1
        t = self.row_steps[row] if self.bias_correction == "row" else self.steps
        if self.maximize:
            g = -g
        if self.decoupled_weight_decay:
            self.p[row] -= self.lr * self.weight_decay * self.p[row]
        else:
            g = g + self.weight_decay * self.p[row]
        self.m[row] = beta1 * self.m[row] + (1 - beta1) * g
        self.v[row] = beta2 * self.v[row] + (1 - beta2) * g**2
        self.v_max[row] = np.maximum(self.v_max[row], self.v[row])
        v = self.v_max[row] if self.amsgrad else self.v[row]
        # SparseAdam adds eps to the root of the second moment before its bias is corrected.
        step_size = self.lr * math.sqrt(1 - beta2**t) / (1 - beta1**t)
        self.p[row] -= step_size * self.m[row] / (np.sqrt(v) + self.eps)

"""The numbers that one row update needs, as both backends take them.

A row update is, for the summed gradient g of a row (SparseAdam's equations, in the order they are computed):

    g     = -g                             if maximize
    p     = p * shrink                     decoupled weight decay, shrink = 1 - lr * weight_decay
    g     = g + decay * p                  coupled weight decay
    m     = m + (g - m) * (1 - beta1)
    v     = v + (g*g - v) * (1 - beta2)
    u     = max(u, v)                      amsgrad; u takes the place of v below
    p     = p - step_size * (m / (sqrt(v) + eps))

with ``step_size = lr * sqrt(1 - beta2^t) / (1 - beta1^t)``. That is torch.optim.SparseAdam's rule. torch.optim.Adam's,
``as_dense``, differs in two places. It adds eps to the bias-corrected sqrt(v), which is the same as adding
``eps * sqrt(1 - beta2^t)`` to the uncorrected one. And it has

    v     = v * beta2 + g*g * (1 - beta2)

so that a v beyond what its dtype can hold stays infinite, and the weight where it is; SparseAdam's becomes NaN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # rowstep.arrays needs the rule, and no torch
    from torch import Tensor


@dataclass(slots=True)
class Rule:
    """One step's scalars for one table. An optional that is None is a term that the update does not have."""

    beta1: float
    beta2: float
    eps: float
    step_size: float
    """lr with bias correction; with ``per_row`` the bare lr, and each row's own count gives its correction."""
    maximize: bool = False
    shrink: float | None = None
    decay: float | None = None
    amsgrad: bool = False
    per_row: bool = False
    as_dense: bool = False
    """torch.optim.Adam's rule. Its eps is corrected already, but with ``per_row``."""
    skip_nonfinite: bool = False


def bias_corrected(lr: float | Tensor, beta1: float, beta2: float, step: int) -> float:
    """lr * sqrt(1 - beta2^t) / (1 - beta1^t), in the dtype of a Tensor lr, as torch computes it."""
    return float(lr * math.sqrt(1 - beta2**step) / (1 - beta1**step))


def row_rule(
    *,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    step: int,
    maximize: bool,
    weight_decay: float,
    decoupled_weight_decay: bool,
    amsgrad: bool = False,
    per_row: bool = False,
    as_dense: bool = False,
    skip_nonfinite: bool = False,
) -> Rule:
    """The rule for a table's ``step``-th step under these options."""
    beta1, beta2 = float(betas[0]), float(betas[1])  # torch takes Tensors of one number too
    rule = Rule(beta1, beta2, eps, 0.0, maximize, None, None, amsgrad, per_row, as_dense, skip_nonfinite)
    if per_row:
        rule.step_size = float(lr)
    else:
        rule.step_size = bias_corrected(lr, beta1, beta2, step)
        if as_dense:
            rule.eps = eps * math.sqrt(1 - beta2**step)
    if weight_decay != 0:
        if decoupled_weight_decay:
            rule.shrink = float(1 - lr * weight_decay)
        else:
            rule.decay = weight_decay
    return rule

"""The numbers that one update needs, as both backends take them.

For the gradient g of an element, in the order they are computed:

    p     = p * shrink                     decoupled weight decay, shrink = 1 - lr * weight_decay
    g     = g + decay * p                  coupled weight decay
    m     = m + (g - m) * (1 - beta1)
    v     = v + (g*g - v) * (1 - beta2)
    p     = p - step_size * (m / (sqrt(v) + eps))

with ``step_size = lr * sqrt(1 - beta2^t) / (1 - beta1^t)`` and ``eps * sqrt(1 - beta2^t)`` in the place of eps. That
is Adam with eps added to the bias-corrected root, written so that the corrections cost nothing per element.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class Rule(NamedTuple):
    """One step's scalars, in the order the kernels take them. None is a term that the update does not have."""

    beta1: float
    beta2: float
    eps: float
    step_size: float
    shrink: float | None
    decay: float | None


def rule_at(
    step: int, *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, decoupled: bool
) -> Rule:
    """The rule for the ``step``-th iteration."""
    beta1, beta2 = betas
    correction2 = math.sqrt(1 - beta2**step)
    shrink = 1 - lr * weight_decay if decoupled and weight_decay else None
    decay = weight_decay if weight_decay and not decoupled else None
    return Rule(beta1, beta2, eps * correction2, lr * correction2 / (1 - beta1**step), shrink, decay)

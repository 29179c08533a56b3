"""Adam: the scalars of a step, and the update. All else in this library is where, when and how fast.

For the summed gradient g of a row, in this order:

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

so that a v beyond what its dtype can hold stays infinite, and the weight stays where it is; SparseAdam's becomes NaN.

A table of 10^8 rows cannot afford two numbers for every weight. ``second_moment`` says what v is made of:

    element     v_ij                       one number per weight: the above
    row         v_ij = r_i                 one per row: r_i averages the row's mean of g*g

r is averaged as v is, so one bias correction serves both. Without momentum (beta1 = 0), m is g, and with a second
moment per row nothing is kept of it: a table then has 4 bytes of state per row. With moments per element the state
stays torch's, so that checkpoints pass both ways.

``update``, ``averaged`` and ``corrections`` are written once. torch tensors, NumPy arrays and the scalars of a compiled
kernel all run through them: whoever calls passes its own ``sqrt`` and ``maximum``, and casts scalars to its own type
first.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # rowstep.arrays needs the rule, and no torch
    from collections.abc import Callable

    from torch import Tensor


class Scalars(NamedTuple):
    """The numbers of one step. A term that the update does not have is None."""

    beta1: float
    beta2: float
    eps: float
    step_size: float
    shrink: float | None
    decay: float | None


def scalars(
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    count: int,
    weight_decay: float,
    is_decoupled: bool,
    is_per_row: bool = False,
    as_dense: bool = False,
) -> tuple[float, float, float, float, float | None, float | None]:
    """The numbers of a table's ``count``-th step, as ``Scalars`` has them; a Tensor lr is computed in its own dtype.

    With ``is_per_row`` they come without bias corrections: each row's own count gives them.
    """
    beta1, beta2 = betas
    shrink = decay = None
    if weight_decay != 0 and is_decoupled:
        shrink = float(1 - lr * weight_decay)
    elif weight_decay != 0:
        decay = weight_decay
    if is_per_row:
        return beta1, beta2, eps, float(lr), shrink, decay
    first, second = corrections(beta1, beta2, count, math.sqrt)
    return beta1, beta2, eps * second if as_dense else eps, float(lr * second / first), shrink, decay


def corrections(beta1: Any, beta2: Any, count: Any, sqrt: Callable[[Any], Any]) -> tuple[Any, Any]:
    """The bias corrections after ``count`` steps: divisors of m and of sqrt(v)."""
    return 1 - beta1**count, sqrt(1 - beta2**count)


def averaged(v: Any, square: Any, beta2: Any, one_minus_beta2: Any, as_dense: Any) -> Any:
    """The second moment of a row after one more mean square; ``update`` has the same for an element."""
    if as_dense is not None:
        return v * beta2 + square * one_minus_beta2
    return v + (square - v) * one_minus_beta2


def update(
    p: Any, m: Any, v: Any, u: Any, g: Any,
    one_minus_beta1: Any, beta2: Any, one_minus_beta2: Any, eps: Any, step_size: Any,
    maximize: Any, shrink: Any, decay: Any, as_dense: Any,
    sqrt: Any, maximum: Any,
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """One step: the new p, m, v and u. What the rule does not have is None, also ``maximize`` and ``as_dense``.

    With a second moment per row v is None, and ``step_size`` has been divided by its root plus eps, once for the row.

    Each test for None is a statement of its own, because Numba drops a branch only then.
    """
    if maximize is not None:
        g = -g
    if shrink is not None:
        p = p * shrink
    if decay is not None:
        g = g + decay * p
    direction = g
    if m is not None:
        m = m + (g - m) * one_minus_beta1
        direction = m
    if v is not None:
        if as_dense is not None:  # noqa: SIM108  see above
            v = v * beta2 + g * g * one_minus_beta2
        else:
            v = v + (g * g - v) * one_minus_beta2
        divisor = v
        if u is not None:
            u = maximum(u, v)
            divisor = u
        direction = direction / (sqrt(divisor) + eps)
    return p - step_size * direction, m, v, u

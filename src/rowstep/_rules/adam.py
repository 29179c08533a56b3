"""Adam: what it keeps, the scalars of a step, and the update. All else in this library is where, when and how fast.

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

``update`` and ``corrections`` are written once. torch tensors, NumPy arrays and the scalars of a compiled kernel all
run through them: whoever calls passes its own ``sqrt`` and ``maximum``, and casts scalars to its own type first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # rowstep.arrays needs the rule, and no torch
    from collections.abc import Callable

    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Slot:
    """One thing that the rule keeps for a parameter."""

    name: str
    per: Literal["table", "row", "element"]
    dtype: Literal["parameter", "int64", "count"]
    """``count``: an int after a sparse step, as torch.optim.SparseAdam has it; a float Tensor after a dense one."""
    option: tuple[str, Any] | None = None
    """The option of a group, and its value, with which the slot exists; None if it always does."""


SLOTS = (
    Slot("step", "table", "count"),
    Slot("exp_avg", "element", "parameter"),
    Slot("exp_avg_sq", "element", "parameter"),
    Slot("max_exp_avg_sq", "element", "parameter", ("amsgrad", True)),
    Slot("row_step", "row", "int64", ("bias_correction", "row")),
)
"""In the order of the equations: t, m, v, u and, per row, the t of its own."""


@dataclass(slots=True)
class Scalars:
    """What one step of one table takes besides tensors. A term that the update does not have is None."""

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
    """torch.optim.Adam's rule. ``eps`` is bias-corrected already, except with ``per_row``."""
    skip_nonfinite: bool = False


def scalars(
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
) -> Scalars:
    """The scalars of a table's ``step``-th step under these options; a Tensor lr is computed with in its own dtype."""
    # torch takes Tensors of one number too. And kernels are compiled for floats.
    beta1, beta2, eps, weight_decay = float(betas[0]), float(betas[1]), float(eps), float(weight_decay)
    shrink = decay = None
    if weight_decay != 0 and decoupled_weight_decay:
        shrink = float(1 - lr * weight_decay)
    elif weight_decay != 0:
        decay = weight_decay
    if per_row:
        step_size = float(lr)
    else:
        first, second = corrections(beta1, beta2, step, math.sqrt)
        step_size = float(lr * second / first)
        eps = eps * second if as_dense else eps
    return Scalars(
        beta1, beta2, eps, step_size, maximize, shrink, decay, amsgrad, per_row, as_dense, skip_nonfinite
    )  # fmt: skip


def corrections(beta1: Any, beta2: Any, count: Any, sqrt: Callable[[Any], Any]) -> tuple[Any, Any]:
    """The bias corrections after ``count`` steps: divisors of m and of sqrt(v)."""
    return 1 - beta1**count, sqrt(1 - beta2**count)


def update(
    p: Any, m: Any, v: Any, u: Any, g: Any,
    one_minus_beta1: Any, beta2: Any, one_minus_beta2: Any, eps: Any, step_size: Any,
    maximize: Any, shrink: Any, decay: Any, as_dense: Any,
    sqrt: Any, maximum: Any,
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """One step: the new p, m, v and u. What the rule does not have is None, also ``maximize`` and ``as_dense``.

    Each test for None is a statement of its own, because Numba drops a branch only then.
    """
    if maximize is not None:
        g = -g
    if shrink is not None:
        p = p * shrink
    if decay is not None:
        g = g + decay * p
    m = m + (g - m) * one_minus_beta1
    if as_dense is not None:  # noqa: SIM108  see above
        v = v * beta2 + g * g * one_minus_beta2
    else:
        v = v + (g * g - v) * one_minus_beta2
    divisor = v
    if u is not None:
        u = maximum(u, v)
        divisor = u
    return p - step_size * (m / (sqrt(divisor) + eps)), m, v, u

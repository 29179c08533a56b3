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
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from .rounding import step_key

if TYPE_CHECKING:  # rowstep.arrays needs the rule, and no torch
    from collections.abc import Callable

    from torch import Tensor


class Kept(NamedTuple):
    """What a table keeps under the options of its group, as far as its moments go."""

    second: str = "element"
    first: bool = True
    amsgrad: bool = False
    dtype: Any = None
    """Of numbers per weight; None stands for the parameter's own."""

    @property
    def is_rounded(self) -> bool:
        """Whether it is rounded at random: in 16 bits, if those were asked for."""
        return self.dtype is not None and self.dtype.itemsize == 2


AS_TORCH = Kept()


def kept_under(group: Mapping[str, Any], *, in_a_table: bool = True) -> Kept:
    """What the options of a group make a table keep. Any other parameter, one with dense gradients, is kept as torch
    keeps it.
    """
    amsgrad = bool(group["amsgrad"])
    second, dtype = group.get("second_moment", "element"), group.get("state_dtype")
    if not in_a_table or (second == "element" and dtype is None):
        return Kept(amsgrad=amsgrad) if amsgrad else AS_TORCH
    return Kept(second, second == "element" or float(group["betas"][0]) != 0, amsgrad, dtype)


@dataclass(frozen=True, slots=True)
class Slot:
    """One thing that the rule keeps for a parameter."""

    name: str
    per: Literal["table", "row", "element"]
    dtype: Literal["state", "wide", "int64", "count"]
    """``state``: the parameter's, or what ``state_dtype`` says. ``wide``: the parameter's, but at least float32.

    ``count``: an int after a sparse step, as torch.optim.SparseAdam has it; a float Tensor after a dense one.
    """
    option: tuple[str, Any] | None = None
    """The option of a group, and its value, with which the slot exists; None if it always does."""
    second: tuple[str, ...] = ("element", "row")
    """The kinds of second moment with which it exists."""

    def is_in(self, kept: Kept) -> bool:
        """Whether it is one of the moments that are kept."""
        if self.name == "exp_avg":
            return kept.first
        is_asked_for = self.option is None or (kept.amsgrad and self.option[0] == "amsgrad")
        return self.dtype not in ("count", "int64") and kept.second in self.second and is_asked_for


SLOTS = (
    Slot("step", "table", "count"),
    Slot("exp_avg", "element", "state"),
    Slot("exp_avg_sq", "element", "state", second=("element",)),
    Slot("exp_avg_sq_row", "row", "wide", second=("row",)),
    Slot("max_exp_avg_sq", "element", "state", ("amsgrad", True), second=("element",)),
    Slot("row_step", "row", "int64", ("bias_correction", "row")),
)
"""In the order of the equations: t, m, v or r, u and, per row, the t of its own."""


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
    per_row: bool = False
    as_dense: bool = False
    """torch.optim.Adam's rule. ``eps`` is bias-corrected already, except with ``per_row``."""
    skip_nonfinite: bool = False
    kept: Kept = AS_TORCH
    rounds_state: bool = False
    rounds_weights: bool = False
    """Whether what is stored in 16 bits is rounded up or down at random, as ``key`` says; see ``rounding``."""
    key: int = 0


def scalars(
    *,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    step: int,
    maximize: bool,
    weight_decay: float,
    decoupled_weight_decay: bool,
    per_row: bool = False,
    as_dense: bool = False,
    skip_nonfinite: bool = False,
    kept: Kept = AS_TORCH,
    rounds_weights: bool = False,
    seed: int = 0,
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
    rounds_state = kept.is_rounded
    key = step_key(seed, step) if rounds_state or rounds_weights else 0
    return Scalars(
        beta1, beta2, eps, step_size, maximize, shrink, decay, per_row, as_dense, skip_nonfinite,
        kept, rounds_state, rounds_weights, key,
    )  # fmt: skip


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

"""Check what a parameter group asks for, before anything is built on it.

The sentences begin as torch's do, so that code which matches them keeps working, and go on with what was expected.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence, Set
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from ._memory import address_of, end_of, share_numbers
from ._rules.rounding import LARGEST_SEED

CHOICES: dict[str, tuple[Any, ...]] = {
    "maximize": (False, True),
    "decoupled_weight_decay": (False, True),
    "amsgrad": (False, True),
    "force_sparse": (False, True),
    "bias_correction": ("global", "row"),
    "nonfinite": ("propagate", "skip"),
    "second_moment": ("element", "row"),
    "state_dtype": (None, torch.bfloat16, torch.float16, torch.float32, torch.float64),
    "stochastic_rounding": (False, True),
    "foreach": (None, False, True),
    "fused": (None, False, True),
    "capturable": (False, True),
    "differentiable": (False, True),
}

HOW_TORCH_STEPS = ("foreach", "fused", "capturable", "differentiable")
"""Options that say how torch steps parameters with dense gradients, and not where to."""


def check_learning_rate(
    group: Mapping[str, Any], where: str = "", *, zero_allowed: bool = True, may_wait: bool = True
) -> None:
    """lr > 0 for an optimizer; a group's may be 0, for a scheduler's warm-up or a frozen group.

    A step may not wait for an lr on a GPU, and takes it as it is.
    """
    lr = group["lr"]
    if type(lr) is float and 0 < lr < math.inf:  # as nearly always, and schedulers set one at every step
        return
    if isinstance(lr, Tensor):
        if lr.numel() != 1:
            raise ValueError(f"Tensor lr must be 1-element{where}, but has {lr.numel()} elements")
        if group.get("foreach"):
            raise ValueError(
                f"lr as a Tensor is not supported for capturable=False and foreach=True{where}; expected a number, or "
                "foreach=None"
            )
        if not may_wait and not lr.is_cpu and _has_number(lr):
            return
    number = _number(lr)
    if number is None or not (0 < number < math.inf or (number == 0 and zero_allowed)):
        bound = ">= 0" if zero_allowed else "> 0"
        raise ValueError(f"Invalid learning rate: {_shown(lr)}{where}; expected a finite number {bound}")


def rate_of(lr: Any) -> float | Tensor:
    """An lr that has been checked, as arithmetic takes it: a Tensor counts in its own dtype, as in torch."""
    return lr if isinstance(lr, Tensor) else float(lr)


def check_group(group: Mapping[str, Any], where: str = "") -> None:
    """Everything in a group but its lr; ``where`` names the group in the message."""
    eps, betas, weight_decay = group["eps"], group["betas"], group["weight_decay"]
    if not (_is_finite(eps) and eps > 0):
        raise ValueError(f"Invalid epsilon value: {_shown(eps)}{where}; expected a finite number > 0")
    if not isinstance(betas, Sequence) or len(betas) != 2:
        raise ValueError(f"Invalid betas: {_shown(betas)}{where}; expected two numbers in [0, 1)")
    for index, beta in enumerate(betas):
        if not (_is_finite(beta) and 0.0 <= beta < 1.0):
            raise ValueError(
                f"Invalid beta parameter at index {index}: {_shown(beta)}{where}; expected a number in [0, 1)"
            )
    if not (_is_finite(weight_decay) and weight_decay >= 0):
        raise ValueError(f"Invalid weight_decay value: {_shown(weight_decay)}{where}; expected a finite number >= 0")
    for name, choices in CHOICES.items():
        if name in group and (isinstance(group[name], (Tensor, float)) or group[name] not in choices):
            expected = " or ".join(map(repr, choices))
            shown = repr(group[name]) if isinstance(choices[0], str) else _shown(group[name])
            raise ValueError(f"Invalid {name}: {shown}{where}; expected {expected}")
    folder = group.get("state_dir")
    if folder is not None and not isinstance(folder, (str, os.PathLike)):
        raise ValueError(f"Invalid state_dir: {folder!r}{where}; expected a path or None")
    second, seed = group.get("second_moment", "element"), group.get("seed", 0)
    if second != "element" and group.get("amsgrad"):
        raise ValueError(
            f"amsgrad=True with second_moment={second!r} is not supported{where}: amsgrad keeps a maximum for every "
            "weight, which is what this second moment does without. Use amsgrad=False or second_moment='element'"
        )
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed <= LARGEST_SEED:
        raise ValueError(f"Invalid seed: {_shown(seed)}{where}; expected an integer in [0, 2^63)")
    if group.get("foreach") and group.get("fused"):
        raise RuntimeError(f"`fused` and `foreach` cannot be `True` together{where}; expected one of them")
    if group.get("capturable"):
        raise ValueError(
            f"capturable=True is not supported{where}: steps are counted in Python, and a CUDA graph would replay one "
            "of them for ever. Use capturable=False"
        )
    if group.get("differentiable"):
        raise ValueError(
            f"differentiable=True is not supported{where}: rows are updated in place, which autograd does not see. Use "
            "differentiable=False, or torch.optim.Adam"
        )


def refuse_idle_rounding(group: Mapping[str, Any], where: str) -> None:
    """Raise if weights are to be rounded at random, and the group has none that are rounded at all."""
    if group.get("stochastic_rounding") and not any(param.dtype.itemsize == 2 for param in group["params"]):
        raise ValueError(
            f"stochastic_rounding=True has nothing to round{where}: no parameter is float16 or bfloat16. Use it for "
            "tables of 16 bits; for moments of 16 bits use state_dtype, which always rounds at random"
        )


def _number(value: object) -> float | None:
    """A number, or a Tensor or array of one, as a float; None if it is none."""
    if isinstance(value, (str, bytes)) or (isinstance(value, Tensor) and not _has_number(value)):
        return None
    try:
        return float(value)  # type: ignore[arg-type]
    except (OverflowError, RuntimeError, TypeError, ValueError):
        return None


def _has_number(tensor: Tensor) -> bool:
    """Whether a Tensor has one real number, wherever that is."""
    return tensor.numel() == 1 and tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_complex()


def _is_finite(value: object) -> bool:
    number = _number(value)
    return number is not None and math.isfinite(number)


def _shown(value: object) -> str:
    """A value as messages show it: a str as one, because configurations are full of numbers that are not."""
    if isinstance(value, str):
        return f"{value!r} (a str)"
    return f"{value}" if not isinstance(value, Tensor) or _has_number(value) else repr(value)


def check_layouts(groups: Sequence[Mapping[str, Any]], optimizer: str) -> None:
    """Refuse parameters that are sparse or complex themselves, naming each by [group, index]."""

    def positions(has_flaw: Any) -> list[list[int]]:
        return [
            [group_index, index]
            for group_index, group in enumerate(groups)
            for index, param in enumerate(group["params"])
            if has_flaw(param)
        ]

    if sparse := positions(lambda param: param.layout != torch.strided):
        raise ValueError(f"Sparse params at indices {sparse}: {optimizer} requires dense parameter tensors")
    if complex_ := positions(lambda param: param.is_complex()):
        raise ValueError(f"Complex params at indices {complex_}: {optimizer} does not support complex parameters")


def refuse_shared_weights(groups: Sequence[Mapping[str, Any]], those: Set[int]) -> None:
    """Raise if one of the parameters with these ids lies in memory that another parameter of the groups has too."""
    listed = [(param, at, index) for at, group in enumerate(groups) for index, param in enumerate(group["params"])]
    placed = [(address, each) for each in listed if (address := address_of(each[0])) is not None]
    before: list[Tensor] = []
    for address, (param, at, index) in sorted(placed, key=itemgetter(0)):
        before = [other for other in before if end_of(other) > address and other is not param]
        for other in before:
            if (id(param) in those or id(other) in those) and share_numbers(param, other):
                raise ValueError(
                    f"{parameter_name(groups[at], at, index)}: it shares memory with another parameter of this "
                    "optimizer; expected memory of its own, because deferred updates would conflict. Use the same "
                    "Parameter in both places (one.weight = other.weight), or torch.optim.Adam"
                )
        before.append(param)


def parameter_name(group: Mapping[str, Any], group_index: int, index: int) -> str:
    """How messages call a parameter: by its position, and by its name where the optimizer was given names."""
    name = f"parameter {index} of group {group_index}"
    names = group.get("param_names")
    if isinstance(names, (list, tuple)) and index < len(names):
        name += f" ({names[index]!r})"
    return name

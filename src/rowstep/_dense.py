"""Parameters with a dense gradient: torch's own functional Adam, fused where that is safe."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

from ._state import State, count_tensor, largest_count

# Per parameter: itself, its gradient, its state with moments.
_Operands = tuple[Tensor, Tensor, State]

_FUSED = ("cuda", "mps", "xpu")


def update_all(items: Iterable[_Operands], group: Mapping[str, Any]) -> None:
    """One torch.optim.Adam step for these (parameter, gradient, state with moments) under the options of one group."""
    alike: dict[Any, list[_Operands]] = {}
    may_fuse = group.get("fused") or (group.get("fused") is None and group.get("foreach") is None)  # as torch has it
    for param, grad, state in items:
        _ensure_countable(state, param.device)
        is_fused = may_fuse and _can_fuse(param, grad, state)
        alike.setdefault((param.device, param.dtype) if is_fused else None, []).append((param, grad, state))
    for key, some in alike.items():
        _call_torch(some, group, fused=key is not None)


def _ensure_countable(state: State, device: torch.device) -> None:
    """Let ``step`` be a Tensor that torch can add 1 to."""
    step = state["step"]
    if not (isinstance(step, Tensor) and step.is_floating_point()):
        state["step"] = count_tensor(step, device)
    elif step.is_cpu and step.item() >= largest_count(step.dtype):
        state["step"] = count_tensor(step.item())


def _can_fuse(param: Tensor, grad: Tensor, state: State) -> bool:
    step, m, v, dtype = state["step"], state["exp_avg"], state["exp_avg_sq"], param.dtype
    if not (param.is_cpu and step.is_cpu) and (param.device.type not in _FUSED or step.device != param.device):
        return False
    u = state["max_exp_avg_sq"] if "max_exp_avg_sq" in state else m  # noqa: SIM401  mypy: get may give None
    # torch's fused kernel walks the memory of all operands in step without looking at their strides: with a
    # gradient of another layout than the parameter's it silently computes nonsense (torch 2.13, CPU).
    return bool(
        param.is_contiguous() and grad.is_contiguous()
        and m.is_contiguous() and v.is_contiguous() and u.is_contiguous()
        and grad.dtype == dtype and m.dtype == dtype and v.dtype == dtype and u.dtype == dtype
        and step.dtype == torch.float32
    )  # fmt: skip


def _call_torch(items: list[_Operands], group: Mapping[str, Any], *, fused: bool) -> None:
    states = [state for _, _, state in items]
    adam(
        [param for param, _, _ in items],
        [grad for _, grad, _ in items],
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [state["max_exp_avg_sq"] for state in states] if group["amsgrad"] else [],
        [state["step"] for state in states],
        foreach=None if fused else bool(group.get("foreach")),
        fused=fused,
        amsgrad=bool(group["amsgrad"]),
        beta1=float(group["betas"][0]),
        beta2=float(group["betas"][1]),
        lr=group["lr"],
        weight_decay=float(group["weight_decay"]),
        eps=float(group["eps"]),
        maximize=bool(group["maximize"]),
        decoupled_weight_decay=bool(group["decoupled_weight_decay"]),
    )

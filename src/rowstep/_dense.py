"""Parameters with a dense gradient: torch's own functional Adam, fused where that is safe.

An interrupt may strike inside torch's code too, and a parameter must have taken its step whole or not at all. A fused
step counts first and then moves all parameters in one call that nothing interrupts: a canary among them, one number
that always moves, tells afterwards whether the call was made. Where torch takes several calls for a parameter, a copy
of what it was before is kept until it has ended.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

from ._state import MOMENTS, State, count_tensor, largest_count
from ._torch_internals import writes_to

# Per parameter: itself, its gradient, its state with moments.
_Operands = tuple[Tensor, Tensor, State]

_FUSED = ("cuda", "mps", "xpu")


def update_all(items: Iterable[_Operands], group: Mapping[str, Any]) -> None:
    """One torch.optim.Adam step for these (parameter, gradient, state with moments) under the options of one group."""
    fused: dict[tuple[torch.device, torch.dtype], list[_Operands]] = {}
    plain: list[_Operands] = []
    may_fuse = group.get("fused") or (group.get("fused") is None and group.get("foreach") is None)  # as torch has it
    for param, grad, state in items:
        _ensure_countable(state, param.device)
        if may_fuse and _can_fuse(param, grad, state):
            fused.setdefault((param.device, param.dtype), []).append((param, grad, state))
        else:
            plain.append((param, grad, state))
    for alike in fused.values():
        _update_fused(alike, group)
    for item in plain:
        _update_plain(item, group)


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


def _update_fused(items: list[_Operands], group: Mapping[str, Any]) -> None:
    """One call for all: their device and dtype are the same."""
    canary = _canaries.fresh(items[0][0])
    counts = [(state["step"], writes_to(state["step"])) for _, _, state in items]
    try:
        _call_torch([*items, canary], group, fused=True)
    except BaseException:
        if not bool(canary[2]["exp_avg"]):  # at most, torch has counted
            for step, version in counts:
                if writes_to(step) != version:
                    step.sub_(1)
        raise


class _Canaries(threading.local):
    """For each device and dtype a parameter of one number; made once, since that takes 20 µs."""

    def __init__(self) -> None:
        self._known: dict[tuple[torch.device, torch.dtype], _Operands] = {}

    def fresh(self, like: Tensor) -> _Operands:
        """One whose first moment is 0, and will not be once it has been stepped, whatever the betas."""
        key = like.device, like.dtype
        if key not in self._known:
            tensors = {name: like.new_zeros(1) for name in ("param", *MOMENTS)}
            state: State = tensors | {"step": torch.zeros((), device=like.device)}
            self._known[key] = state.pop("param"), like.new_full((1,), 1e4), state
        canary = self._known[key]
        canary[2]["exp_avg"].zero_()
        return canary


_canaries = _Canaries()


def _update_plain(item: _Operands, group: Mapping[str, Any]) -> None:
    param, _, state = item
    tensors = [param, *(state[key] for key in ("step", *MOMENTS) if key in state)]
    before = [tensor.clone() for tensor in tensors]
    try:
        _call_torch([item], group, fused=False)
    except BaseException:
        for tensor, old in zip(tensors, before, strict=True):
            tensor.copy_(old)
        raise


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

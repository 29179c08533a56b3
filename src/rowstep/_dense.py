"""Parameters with a dense gradient: torch's own functional Adam, fused where that is safe."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

from ._gradient import by_first_dimension
from ._state import MOMENTS, State

# The lists that torch's functional Adam takes, per parameter.
_Operands = tuple[Tensor, Tensor, State]

_FUSED = ("cuda", "mps", "xpu")


def update_all(items: Iterable[_Operands], group: Mapping[str, Any]) -> None:
    """One torch.optim.Adam step for these (parameter, gradient, state with moments) under the options of one group."""
    fused: list[_Operands] = []
    plain: list[_Operands] = []
    for param, grad, state in items:
        if not (isinstance(state["step"], Tensor) and state["step"].is_floating_point()):
            state["step"] = torch.tensor(float(state["step"]), dtype=torch.float32, device=param.device)
        (fused if _can_fuse(param, grad, state) else plain).append((param, grad, state))
    _call_torch(fused, group, fused=True)
    _call_torch(plain, group, fused=False)


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
        and grad.dtype == dtype and m.dtype == dtype and v.dtype == dtype
    )  # fmt: skip


def _call_torch(items: list[_Operands], group: Mapping[str, Any], *, fused: bool) -> None:
    if not items:
        return
    states = [state for _, _, state in items]
    adam(
        [param for param, _, _ in items],
        [grad for _, grad, _ in items],
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [state["max_exp_avg_sq"] for state in states] if group["amsgrad"] else [],
        [state["step"] for state in states],
        foreach=None if fused else False,
        fused=fused,
        amsgrad=group["amsgrad"],
        beta1=float(group["betas"][0]),
        beta2=float(group["betas"][1]),
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
        decoupled_weight_decay=group["decoupled_weight_decay"],
    )


def nonfinite_rows(grad: Tensor) -> Tensor:
    """The rows, along the first dimension, that hold a number which is not finite."""
    return by_first_dimension(grad).isfinite().all(dim=1).logical_not().nonzero().squeeze(1)


class Untouched:
    """Puts rows of a parameter and its state back as they were, after an update that does not know how to skip them."""

    def __init__(self, param: Tensor, state: State, rows: Tensor) -> None:
        self._rows = rows
        self._tables = [
            table if table.dim() else table.unsqueeze(0)
            for table in (param, *(state[key] for key in MOMENTS if key in state))
        ]
        self._before = [table.index_select(0, rows) for table in self._tables]

    def restore(self) -> None:
        for table, before in zip(self._tables, self._before, strict=True):
            table.index_copy_(0, self._rows, before)

"""Parameters with a dense gradient: torch's own functional Adam, fused where that is safe, and a warning for tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

from ._options import rate_of
from ._state import ELEMENTWISE, State, count_tensor, largest_count
from ._torch_internals import has_no_memory
from ._warnings import warn

# Per parameter: itself, its gradient, its state with moments.
_Operands = tuple[Tensor, Tensor, State]

_FUSED = ("cuda", "mps", "xpu")
_COUNTS = (torch.float32, torch.float64)

# From this size on, a table is worth a warning. A smaller one's dense step takes under a millisecond; and with fewer
# rows, it may as well be a layer.
_LARGE_TABLE, _MANY_ROWS = 1 << 20, 10_000


def warn_of_dense_tables(params: Iterable[Tensor], name_of: Callable[[Tensor], str]) -> None:
    """Warn if some of these parameters, which have not been stepped before, seem to be tables that could have sparse
    gradients.

    A parameter does not know whether it belongs to a module with ``sparse=True``, so its gradient has to tell.
    """
    tables = [param for param in params if _is_large_table(param)]
    for is_avoidable, text in ((_is_mostly_zero, _MOSTLY_ZERO), (_is_mostly_penalty, _MOSTLY_PENALTY)):
        names = ", ".join(name_of(param) for param in tables if is_avoidable(param))
        if names:
            warn(f"{names}: over nine tenths of the rows of the dense gradient are {text}")


_STEPS_ALL = "a dense gradient steps the whole table; expected a sparse one, which steps only the rows touched"
_MOSTLY_ZERO = f"zero, and {_STEPS_ALL}. Use nn.Embedding(..., sparse=True) or nn.EmbeddingBag(..., sparse=True)"
_MOSTLY_PENALTY = (
    f"the weights times one number, as an L2 penalty on the whole table makes them, and {_STEPS_ALL}. Leave the table "
    "out of the penalty, make its module with sparse=True, and use weight_decay: SparseAdam's decays the rows touched, "
    "DeferredAdamW's every row"
)


def _is_large_table(param: Tensor) -> bool:
    grad: Any = param.grad
    is_plain = type(grad) is Tensor and grad.is_cpu and grad.dim() == 2  # a DTensor would start a collective
    return is_plain and bool(grad.numel() >= _LARGE_TABLE and len(grad) >= _MANY_ROWS and not has_no_memory(grad))


def _is_mostly_zero(param: Tensor) -> bool:
    """Whether few rows of a table were looked up.

    One column answers for all: reading it takes a small part of a dense step, and where a row was looked up it is
    rarely zero. A column without any gradient says nothing.
    """
    grad: Any = param.grad
    return 0 < int(grad[:, 0].count_nonzero()) < len(grad) // 10


def _is_mostly_penalty(param: Tensor) -> bool:
    """Whether few rows of a table have another gradient than what an L2 penalty gives: a sample of a thousand tells."""
    grad: Any = param.grad
    some = slice(None, None, len(grad) // 1000)
    ratios = grad[some, 0].double() / param[some, 0].double()
    middle = float(ratios.nanmedian())
    tolerance = 4 * torch.finfo(grad.dtype).eps * abs(middle)
    return middle != 0 and int(((ratios - middle).abs() <= tolerance).sum()) > 0.9 * len(ratios)


def refuse_capture(param: Tensor) -> None:
    """Raise if a CUDA graph is captured. Of the step it would replay the same one for ever."""
    if param.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a CUDA graph is captured, which cannot count steps; expected a step outside of it")


def update_all(items: Iterable[_Operands], group: Mapping[str, Any]) -> None:
    """One torch.optim.Adam step for these (parameter, gradient, state with moments) under the options of one group."""
    alike: dict[Any, list[_Operands]] = {}
    may_fuse = group.get("fused") or (group.get("fused") is None and group.get("foreach") is None)  # as torch has it
    for param, grad, state in items:
        _ensure_countable(state, param.device)
        is_fused = may_fuse and _can_fuse(param, grad, state, amsgrad=group["amsgrad"])
        how = "fused" if is_fused else "foreach" if group.get("foreach") and _can_foreach(param, grad, state) else ""
        alike.setdefault((how, param.device, param.dtype), []).append((param, grad, state))
    for (how, *_), some in alike.items():
        _call_torch(some, group, how)


def _ensure_countable(state: State, device: torch.device) -> None:
    """Let ``step`` be a Tensor that torch can add 1 to."""
    step = state["step"]
    if not (isinstance(step, Tensor) and step.is_floating_point()):
        state["step"] = count_tensor(step, device)
    elif step.is_cpu and step.item() >= largest_count(step.dtype):
        state["step"] = count_tensor(step.item())


def _can_fuse(param: Tensor, grad: Tensor, state: State, *, amsgrad: bool) -> bool:
    step, m, v, dtype = state["step"], state["exp_avg"], state["exp_avg_sq"], param.dtype
    if not (param.is_cpu and step.is_cpu) and (param.device.type not in _FUSED or step.device != param.device):
        return False
    u = state["max_exp_avg_sq"] if amsgrad else m  # one that a state has without amsgrad is not read
    # torch's fused kernel walks the memory of all operands in step without looking at their strides: with a
    # gradient of another layout than the parameter's it silently computes nonsense (torch 2.13, CPU).
    return bool(
        param.is_contiguous() and grad.is_contiguous()
        and m.is_contiguous() and v.is_contiguous() and u.is_contiguous()
        and grad.dtype == dtype and m.dtype == dtype and v.dtype == dtype and u.dtype == dtype
        and step.dtype == torch.float32
    )  # fmt: skip


def _can_foreach(param: Tensor, grad: Tensor, state: State) -> bool:
    """torch's foreach refuses most mixtures in the middle of a step; its loop takes them."""
    step, moments = state["step"], [state[name] for name in ELEMENTWISE if name in state]
    is_counted = step.dtype in _COUNTS and (step.is_cpu or step.device == param.device)
    return is_counted and all(each.dtype == param.dtype for each in (grad, *moments))


def _rate_beside(param: Tensor, lr: Any, how: str) -> float | Tensor:
    """The lr where torch's kernel can read it: on a GPU, its fused one reads a float32 beside the parameters."""
    rate = rate_of(lr)
    if not isinstance(rate, Tensor) or rate.is_cpu:
        return rate
    return rate.to(param.device, torch.float32) if how == "fused" and not param.is_cpu else rate.cpu()


def _call_torch(items: list[_Operands], group: Mapping[str, Any], how: str) -> None:
    states = [state for _, _, state in items]
    adam(
        [param for param, _, _ in items],
        [grad for _, grad, _ in items],
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [state["max_exp_avg_sq"] for state in states] if group["amsgrad"] else [],
        [state["step"] for state in states],
        foreach=how == "foreach",
        fused=how == "fused",
        amsgrad=bool(group["amsgrad"]),
        beta1=float(group["betas"][0]),
        beta2=float(group["betas"][1]),
        lr=_rate_beside(items[0][0], group["lr"], how),
        weight_decay=float(group["weight_decay"]),
        eps=float(group["eps"]),
        maximize=bool(group["maximize"]),
        decoupled_weight_decay=bool(group["decoupled_weight_decay"]),
    )

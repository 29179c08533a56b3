"""What a step will do, before it does anything: a plan for each group, made of row steps and dense steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ._backends import Backend, RowUpdate
from ._gradient import RowGradient, outside_message
from ._memory import has_memory, lost_memory
from ._rules.adam import Scalars, kept_under, scalars
from ._state import FLOATS, FLOATS_IN_WORDS, State, incomplete
from ._torch_internals import has_no_memory

Group = dict[str, Any]


@dataclass(slots=True)
class RowStep:
    """A parameter whose gradient is taken row by row."""

    param: Tensor
    gradient: RowGradient
    scalars: Scalars
    count: int
    """How many steps the parameter will have taken."""
    update: RowUpdate | None = None
    """None as long as the parameter has no state, or not all of it."""


@dataclass(slots=True)
class DenseStep:
    """A parameter for torch's dense Adam."""

    param: Tensor
    grad: Tensor


class Plan:
    """What one group has to do in this step."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.rows: list[RowStep] = []
        self.dense: list[DenseStep] = []
        self._scalars: dict[tuple[int, bool, bool, bool], Scalars] = {}
        self._counts: dict[int, int] = {}

    def count_after(self, param: Tensor, taken: int) -> int:
        """How many steps a parameter will have taken. One that is listed twice takes two."""
        count = self._counts[id(param)] = self._counts.get(id(param), taken) + 1
        return count

    def scalars(self, count: int, as_dense: bool, param: Tensor, *, in_a_table: bool) -> Scalars:
        """Those of a ``count``-th step: the same for all tables that take it."""
        group = self.group
        rounds = group["stochastic_rounding"] and param.dtype.itemsize == 2
        known = self._scalars.get((count, as_dense, in_a_table, rounds))
        if known is None:
            known = self._scalars[count, as_dense, in_a_table, rounds] = scalars(
                lr=group["lr"],
                betas=group["betas"],
                eps=group["eps"],
                step=count,
                maximize=bool(group["maximize"]),
                weight_decay=group["weight_decay"],
                decoupled_weight_decay=group["decoupled_weight_decay"],
                per_row=group.get("bias_correction") == "row",
                as_dense=as_dense,
                skip_nonfinite=group.get("nonfinite") == "skip",
                kept=kept_under(group, in_a_table=in_a_table),
                rounds_weights=rounds,
                seed=group["seed"],
            )
        return known


def checked_gradient(param: Tensor, grad: Tensor) -> Tensor:
    """The gradient; raise if it does not fit the parameter.

    One that torch represents lazily (negated, or zeros without memory) is written out: its fused Adam takes neither.
    """
    if not grad.is_sparse and grad.layout == torch.strided:
        if grad.is_neg() or has_no_memory(grad):
            grad = torch.empty_like(grad).copy_(grad)
        elif grad.is_cpu and not has_memory(grad):
            raise ValueError(lost_memory("the gradient", grad))
    _check_fit(param, grad)
    return grad


def _check_fit(param: Tensor, grad: Tensor) -> None:
    dtype = param.dtype
    if dtype not in FLOATS:
        raise TypeError(f"the parameter has dtype {dtype}; expected {FLOATS_IN_WORDS}")
    if not grad.is_sparse and grad.layout != torch.strided:
        raise TypeError(f"the gradient's layout is {grad.layout}; expected torch.sparse_coo or torch.strided")
    if grad.shape != param.shape:
        raise ValueError(
            f"the gradient has shape {tuple(grad.shape)}; expected {tuple(param.shape)}, the parameter's shape"
        )
    if grad.dtype != dtype and grad.dtype not in FLOATS:
        raise TypeError(f"the gradient has dtype {grad.dtype}; expected {FLOATS_IN_WORDS}")
    if not (grad.is_cpu and param.is_cpu) and grad.device != param.device:
        raise ValueError(f"the gradient is on {grad.device}; expected {param.device}, the parameter's device")


def is_kept_as_a_table(state: State, group: Group, param: Tensor) -> bool:
    """Whether this state is one that torch's Adam cannot step, because it has been a table's."""
    if "exp_avg_sq_row" in state:
        return True
    asked_for = group["state_dtype"]
    return asked_for not in (None, param.dtype) and "exp_avg" in state and state["exp_avg"].dtype == asked_for


def refuse_outside(gradient: RowGradient, backend: Backend) -> None:
    """Raise unless every row number of the gradient is in its table."""
    outside = backend.outside(gradient)
    if outside is not None:
        raise IndexError(outside_message(outside, gradient.row_count))


def steps_taken(state: State) -> int:
    """How many steps a parameter with this state has taken; raise if that, or some of the state, is not there."""
    step = state.get("step")
    if type(step) is Tensor and step.dtype is torch.float32 and step.is_cpu and not step.is_sparse and has_memory(step):
        # One look at what torch.optim.Adam keeps: `incomplete` takes twice as long.
        number = step.item() if step.numel() == 1 else -1
        if 0 <= number <= 1 << 24 and number == int(number) and "exp_avg" in state and "exp_avg_sq" in state:
            return int(number)
    if reason := incomplete(state):
        raise ValueError(reason)
    return 0 if step is None else int(step)

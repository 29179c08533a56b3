"""The one gate before an address is used.

A kernel takes tensors by address and believes what it is told of them: a tensor that is smaller, or of another type,
than it believes is a corrupted heap. Programs do change tensors behind an optimizer's back. ``weight.data`` is replaced
by a larger table, a storage is resized, a state is edited by hand or loaded from an old file. So whatever a kernel
reads or writes by address passes here first, in every step and before every catch-up, for both backends. An update
takes ``Operands``, which only ``admit`` makes; other entries ask for a table, a gradient, row numbers or notes per row.

What does not belong together raises. What does, but lies elsewhere (another device, strides of its own), is for the
reference to take.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .._gradient import RowGradient
from .._memory import has_memory
from .._state import FLOATS, State, described

_FLOATS = frozenset(FLOATS)


class Operands(NamedTuple):
    """What has passed the gate: a table, its state and a gradient that belong together. Only ``admit`` makes them."""

    param: Tensor
    state: State
    gradient: RowGradient
    are_addressable: bool


def admit(param: Tensor, state: State, gradient: RowGradient, *, amsgrad: bool, counted: bool) -> Operands:
    """Raise unless these can be the operands of an update; say whether kernels can address them.

    ``amsgrad`` and ``counted`` say whether the state must have a maximum and counts per row.
    """
    can_address_gradient = admit_gradient(gradient)
    can_address_table = admit_table(param, state, gradient.lead, amsgrad=amsgrad, counted=counted)
    return Operands(param, state, gradient, can_address_gradient and can_address_table)


def admit_table(param: Tensor, state: State, lead: tuple[int, ...], *, amsgrad: bool, counted: bool) -> bool:
    """Raise unless this is a table with rows over ``lead`` and its state; tell whether kernels can address it all."""
    shape = param.shape
    if shape[: len(lead)] != lead:
        raise ValueError(
            f"the parameter has shape {tuple(shape)} now; expected rows over {lead}, as its state has; "
            "change the rows of a table with the optimizer's grow, keep_rows or permute_rows"
        )
    try:
        m, v = state["exp_avg"], state["exp_avg_sq"]
        fits = _fits(param, shape) and _fits(m, shape) and _fits(v, shape) and v.dtype is m.dtype
        if amsgrad:
            u = state["max_exp_avg_sq"]
            fits = fits and _fits(u, shape) and u.dtype is m.dtype
        if counted:
            counts = state["row_step"]
            fits = fits and counts.is_cpu and counts.is_contiguous() and counts.shape == lead
            fits = fits and counts.dtype == torch.int64 and has_memory(counts)
    except KeyError as missing:
        raise ValueError(f"its state has no {missing}; load a whole state, or clear it to begin anew") from None
    if not fits:
        _explain(param, state, lead, amsgrad=amsgrad, counted=counted)
    return fits


def admit_gradient(gradient: RowGradient) -> bool:
    """Raise unless there is a row of values for each row number; tell whether kernels can address both."""
    if gradient.is_addressable is None:  # one look is enough: nobody else has these tensors
        gradient.is_addressable = _admit_gradient(gradient)
    return gradient.is_addressable


def _admit_gradient(gradient: RowGradient) -> bool:
    rows, values = gradient.rows, gradient.values
    if values.shape != (rows.numel(), gradient.columns) or values.dtype not in _FLOATS or rows.dtype != torch.int64:
        raise ValueError(
            f"the gradient has values {described(values)} for row numbers {described(rows)}; expected a row of "
            f"{gradient.columns} floating-point numbers for each"
        )
    _refuse_lost_memory("the gradient's values", values)
    return admit_rows(rows) and values.is_cpu


def admit_rows(rows: Tensor) -> bool:
    """Raise unless these are row numbers; tell whether kernels can address them."""
    if rows.dim() != 1 or rows.dtype != torch.int64:
        raise ValueError(f"the row numbers are {described(rows)}; expected a list of int64")
    _refuse_lost_memory("the row numbers", rows)
    return rows.is_cpu and rows.is_contiguous()


def admit_notes(since: Tensor, lead: tuple[int, ...]) -> bool:
    """Raise unless there is a note for every row over ``lead``; tell whether kernels can address them."""
    if since.shape != lead or since.dtype != torch.int32:
        raise ValueError(f"the notes per row are {described(since)}; expected one int32 for each row over {lead}")
    _refuse_lost_memory("the notes per row", since)
    return since.is_cpu and since.is_contiguous()


def _fits(tensor: Tensor, shape: torch.Size) -> bool:
    """Whether kernels can address this as floats of this shape."""
    return (
        tensor.is_cpu
        and tensor.is_contiguous()
        and tensor.shape == shape
        and tensor.dtype in _FLOATS
        and has_memory(tensor)
    )


def _refuse_lost_memory(name: str, tensor: Tensor) -> None:
    if tensor.is_cpu and not has_memory(tensor):
        raise ValueError(
            f"the storage of {name} is smaller than its shape {tuple(tensor.shape)} needs; it was freed or resized"
        )


def _explain(param: Tensor, state: State, lead: tuple[int, ...], *, amsgrad: bool, counted: bool) -> None:
    """Raise with the reason, if there is one; tensors that only lie elsewhere are none."""
    if param.dtype not in _FLOATS:
        raise TypeError(f"the parameter has dtype {param.dtype}; expected {', '.join(map(str, FLOATS))}")
    tensors = {"exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}
    if amsgrad:
        tensors["max_exp_avg_sq"] = state["max_exp_avg_sq"]
    for name, tensor in tensors.items():
        if tensor.shape != param.shape or tensor.device != param.device or tensor.dtype not in _FLOATS:
            raise ValueError(f"its state {name!r} is {described(tensor)}, the parameter is {described(param)}")
    if counted:
        counts = tensors["row_step"] = state["row_step"]
        if counts.dtype != torch.int64 or counts.device != param.device:
            raise ValueError(f"its state 'row_step' is {described(counts)}; expected int64 counts on {param.device}")
        if counts.shape != lead:
            raise ValueError(
                f"the gradient's rows run over dimensions {lead}, but bias_correction='row' has counted rows over "
                f"{tuple(counts.shape)}; expected gradients of one sparse_dim"
            )
    for name, tensor in {"the parameter": param, **tensors}.items():
        _refuse_lost_memory(name, tensor)

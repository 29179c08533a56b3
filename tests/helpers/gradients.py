"""Tables and gradients to test with, and what it means for two tensors to be the same."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

BITS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64}


def table(*shape: int, dtype: torch.dtype = torch.float32) -> Parameter:
    """A parameter of this shape with random weights."""
    return Parameter(torch.randn(shape, dtype=torch.float64).to(dtype))


def copy_of(param: Tensor) -> Parameter:
    """A parameter with the same weights, for a second optimizer."""
    return Parameter(param.detach().clone())


def sparse(indices: Any, values: Tensor, shape: Iterable[int], *, checked: bool = True) -> Tensor:
    """A COO tensor. Unless ``checked``, its indices may lie anywhere."""
    return torch.sparse_coo_tensor(torch.as_tensor(indices), values, tuple(shape), check_invariants=checked)


def rows_of(param: Tensor, ids: Sequence[int] | Tensor, values: Tensor | float | None = None) -> Tensor:
    """The gradient that a lookup of ``ids`` leaves in ``param``: uncoalesced, one entry per lookup, in their order.

    ``values`` are random, or one number, or a row for each id.
    """
    ids = torch.as_tensor(ids, dtype=torch.int64)
    shape = (len(ids), *param.shape[1:])
    if values is None:
        values = torch.randn(shape, dtype=torch.float64)
    elif not isinstance(values, Tensor):
        values = torch.full(shape, float(values), dtype=torch.float64)
    return sparse(ids.unsqueeze(0), values.to(param.dtype).reshape(shape), param.shape)


def entries_of(param: Tensor, count: int, sparse_dim: int) -> Tensor:
    """A gradient with ``count`` random entries, some of them the same, over the first ``sparse_dim`` dimensions."""
    lead, rest = param.shape[:sparse_dim], param.shape[sparse_dim:]
    flat = torch.randint(math.prod(lead), (count,)) if count else torch.empty(0, dtype=torch.int64)
    indices = torch.stack(torch.unravel_index(flat, lead)) if lead else torch.empty(0, count, dtype=torch.int64)
    return sparse(indices, torch.randn(count, *rest, dtype=torch.float64).to(param.dtype), param.shape)


def ids_at_most_twice(rows: int, count: int) -> Tensor:
    """Row numbers in random order, none of them more than twice."""
    return torch.cat([torch.randperm(rows), torch.randperm(rows)])[torch.randperm(2 * rows)[:count]]


def set_grad(param: Tensor, grad: Tensor | None) -> None:
    """Put a gradient into a parameter, even one of another dtype."""
    if grad is None or grad.dtype == param.dtype:
        param.grad = grad
    elif hasattr(Tensor, "grad_dtype"):
        param.grad_dtype = None
        param.grad = grad
    else:  # an older torch refuses such a gradient, but lets the parameter's dtype change while it has one
        weights, is_trained = param.data, param.requires_grad
        param.requires_grad_(False)
        param.grad, param.data = None, weights.to(grad.dtype)
        param.grad, param.data = grad, weights
        param.requires_grad_(is_trained)


def step_with(optimizer: Optimizer, param: Tensor, grad: Tensor | None) -> None:
    """One step of ``optimizer`` with this gradient in ``param``."""
    set_grad(param, grad)
    optimizer.step()


def bits(tensor: Tensor) -> Tensor:
    """The tensor's memory as integers, so that NaN is equal to itself and 0 is not -0."""
    return tensor.detach().contiguous().view(BITS.get(tensor.dtype, tensor.dtype))


def same_bits(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(bits(left), bits(right))


class Snapshot:
    """Everything an optimizer could change, as it was: to show that nothing has."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._before = self._everything()

    def _everything(self) -> dict[str, Any]:
        with torch._C.DisableTorchFunctionSubclass():  # reading a table would bring it up to date
            return self._in_memory()

    def _in_memory(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for g, group in enumerate(self._optimizer.param_groups):
            for i, param in enumerate(group["params"]):
                found[f"[{g}, {i}]"] = bits(param).clone()
                found[f"[{g}, {i}] version"] = param._version
                for key, value in self._optimizer.state.get(param, {}).items():
                    found[f"[{g}, {i}] {key}"] = value.clone() if isinstance(value, Tensor) else value
        return found

    def assert_unchanged(self) -> None:
        now = self._everything()
        assert now.keys() == self._before.keys()
        for key, value in self._before.items():
            same = torch.equal(value, now[key]) if isinstance(value, Tensor) else value == now[key]
            assert same, f"{key} was {value} and is {now[key]}"

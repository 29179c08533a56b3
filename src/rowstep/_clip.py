"""Gradient clipping for models whose gradients are part sparse, part dense.

torch's own functions refuse sparse gradients. Here the norm of a sparse gradient is that of what it sums to, duplicates
combined, as if it were dense; nothing of the table's size is made, and the gradient stays sparse.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import _backends
from ._gradient import RowGradient, outside_message, row_gradient
from ._shard import shard_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale all gradients together so that their norm is at most ``max_norm``; return the norm before.

    As :func:`torch.nn.utils.clip_grad_norm_`, for sparse and dense gradients. ``foreach`` is for the dense ones.

    Of a sharded table, the norm counts the rows of all ranks; then every rank of its group must make this call. Other
    gradients are taken to be the same on every rank, as DistributedDataParallel makes them.
    """
    norm_type = float(norm_type)
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    grads = [param.grad for param in parameters if param.grad is not None]
    sparse = [grad for grad in grads if grad.is_sparse]
    dense = [grad for grad in grads if not grad.is_sparse]
    total = _norm_over_ranks(parameters, norm_type, foreach)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients is {total.item()}, so it cannot be clipped; to scale "
            "by it all the same, set error_if_nonfinite=False"
        )
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    if factor.is_cpu and factor == 1:  # nothing to clip, and reading the factor costs no wait for a device
        return total
    for values in _distinct([grad._values() for grad in sparse]) + dense:
        values.mul_(factor.to(values.device))
    return total


@torch.no_grad()
def clip_grad_value_(parameters: Tensor | Iterable[Tensor], clip_value: float, foreach: bool | None = None) -> None:
    """Clamp every number of every gradient to [-clip_value, clip_value].

    As :func:`torch.nn.utils.clip_grad_value_`, for sparse and dense gradients. What is clamped is a row's sum, so the
    duplicates of a sparse gradient are combined: ``.grad`` is a coalesced gradient afterwards.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    dense = [param for param in parameters if param.grad is not None and not param.grad.is_sparse]
    torch.nn.utils.clip_grad_value_(dense, clip_value, foreach=foreach)
    for param in parameters:
        if param.grad is not None and param.grad.is_sparse:
            grad = param.grad.coalesce()
            values = grad.values().clamp(-float(clip_value), float(clip_value))
            param.grad = torch.sparse_coo_tensor(
                grad.indices(), values, grad.shape, is_coalesced=True, check_invariants=False
            )


def _norm_over_ranks(parameters: list[Tensor], norm_type: float, foreach: bool | None) -> Tensor:
    """The norm of all gradients, where those of a sharded table are on several ranks."""
    by_group: dict[ProcessGroup | None, list[Tensor]] = {None: []}  # in one order on all ranks: the parameters'
    for param in parameters:
        shard = shard_of(param)
        by_group.setdefault(None if shard is None else shard.group, []).append(param)
    if len(by_group) == 1:
        return _total_norm(parameters, norm_type, foreach)
    if norm_type <= 0:
        raise ValueError(f"Invalid norm_type value: {norm_type}; expected one above 0 where tables are sharded")
    from .distributed import _exchange

    local: dict[ProcessGroup | None, float] = {}

    def measure(group: ProcessGroup) -> float:
        if not local:  # all at the first call, so that whatever is wrong here, every rank hears of it
            local.update((key, float(_total_norm(params, norm_type, foreach))) for key, params in by_group.items())
        return local[group]

    norms = [
        norm
        for group in by_group
        if group is not None
        for norm in _exchange.gather_numbers(functools.partial(measure, group), group)
    ]
    total: Tensor = torch.linalg.vector_norm(torch.tensor([local[None], *norms], dtype=torch.float64), norm_type)
    first = parameters[0]
    return total.to(first.device, torch.promote_types(first.dtype, torch.float32))


def _total_norm(parameters: list[Tensor], norm_type: float, foreach: bool | None) -> Tensor:
    grads = [param.grad for param in parameters if param.grad is not None]
    sparse = [grad for grad in grads if grad.is_sparse]
    dense = [grad for grad in grads if not grad.is_sparse]
    backend = _backends.chosen()
    norms = [backend.norm(_checked(grad, backend), norm_type) for grad in sparse]
    if dense:
        of_dense: Tensor = torch.nn.utils.get_total_norm(dense, norm_type, foreach=foreach)
        if not norms:
            return of_dense
        norms.append(float(of_dense))
    first = (dense or sparse or [torch.zeros(())])[0]
    dtype = torch.promote_types(first.dtype, torch.float32)
    total: Tensor = torch.linalg.vector_norm(torch.tensor(norms or [0.0], dtype=torch.float64), norm_type)
    return total.to(device=first.device, dtype=dtype)


def _checked(grad: Tensor, backend: _backends.Backend) -> RowGradient:
    gradient = row_gradient(grad, grad.shape)
    outside = backend.first_outside(gradient.rows, gradient.row_count)
    if outside is not None:
        raise IndexError(outside_message(outside, gradient.row_count))
    return gradient


def _distinct(tensors: list[Tensor]) -> list[Tensor]:
    """Without those that share their memory: where two lookups are added up, both gradients hold the same values."""
    return list({(tensor.data_ptr(), tensor.shape): tensor for tensor in tensors}.values())

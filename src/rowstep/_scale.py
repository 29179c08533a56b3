"""Scale sparse gradients without changing memory that others share.

Autograd passes memory on wherever it can, so the values of a sparse gradient may also belong to somebody else:

    a(ids) + cat([b(x), c(y)])       the gradients of b and c are views of a's
    table(ids) + dense.view(n, d)    the gradient of the dense parameter is a view of the table's
    table(ids).backward(g)           the gradient is a view of the caller's g
    table(ids).sum().backward()      the gradient is one number, repeated by a stride of 0

So a sparse gradient always gets new values, made before any gradient is written to. ``param.grad`` stays the same
object. Dense gradients are torch's to scale, in place: others hold their memory on purpose (DistributedDataParallel's
buckets, FSDP's shards).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._torch_internals import indices_of, values_of


def scaled(grad: Tensor, factor: Tensor) -> Tensor:
    """A sparse gradient times a number, in memory of its own."""
    indices, values = indices_of(grad), values_of(grad)
    return like_sparse(grad, indices, values * factor.to(values.device))


def like_sparse(grad: Tensor, indices: Tensor, values: Tensor, *, coalesced: bool | None = None) -> Tensor:
    """A sparse gradient with these entries, coalesced if ``grad`` is unless told otherwise."""
    coalesced = grad.is_coalesced() if coalesced is None else coalesced
    return torch.sparse_coo_tensor(
        indices, values, grad.shape, device=values.device, is_coalesced=coalesced, check_invariants=False
    )


def replace(grad: Tensor, other: Tensor) -> None:
    """Give ``grad`` the memory of ``other``. It stays the same object, and its old memory is as it was."""
    grad.data = other
    torch.autograd.graph.increment_version(grad)  # what a graph saved of it is out of date

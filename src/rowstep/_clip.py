"""Gradient clipping for models whose gradients are part sparse, part dense.

torch's own functions refuse sparse gradients. Here the norm of a sparse gradient is that of what it sums to, duplicates
combined, as if it were dense; nothing of the table's size is made, and the gradient stays sparse.

Autograd passes memory on wherever it can, so the values of a sparse gradient may also belong to somebody else:

    a(ids) + cat([b(x), c(y)])       the gradients of b and c are views of a's
    table(ids) + dense.view(n, d)    the gradient of the dense parameter is a view of the table's
    table(ids).backward(g)           the gradient is a view of the caller's g
    table(ids).sum().backward()      the gradient is one number, repeated by a stride of 0

So a sparse gradient always gets new values, made before any gradient is written to. ``param.grad`` stays the same
object. Dense gradients are torch's to scale, in place: others hold their memory on purpose (DistributedDataParallel's
buckets, FSDP's shards). Of a DTensor, torch's functions get the local part: they refuse a mix of DTensors and others.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import _backends
from ._dtensors import MeshGradients, is_partial
from ._gradient import RowGradient, row_gradient
from ._memory import is_dtensor
from ._part import Peers, identities, part_of
from ._state import compute_dtype
from ._torch_internals import indices_of, values_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

# Kept here, because programs put ours in its place, to reach a framework's clipping.
_torch_clip_grad_value: Any = torch.nn.utils.clip_grad_value_


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale all gradients together so that their norm is at most ``max_norm``. Return the norm before scaling.

    Like torch.nn.utils.clip_grad_norm_, for sparse and dense gradients:

        norm = (Σ |g|^norm_type) ^ (1 / norm_type)         over all elements of all gradients
        g ← g · min(1, max_norm / (norm + 1e-6))

    The norm of a sparse gradient is that of what it sums to. ``param.grad`` stays the same object, and each gradient is
    scaled once, even if parameters share one. torch scales the dense gradients, in place. A sparse gradient gets a new
    values tensor, because other gradients, or what was passed to ``backward``, may share the old one.

    For sharded tables and DTensors, the norm covers what all ranks hold: all of them must make this call, and all get
    the norm, a plain Tensor. Other gradients are assumed to be the same on every rank, as under
    DistributedDataParallel.

    Args:
        parameters: a Tensor, or Tensors, whose gradients to scale.
        max_norm: the largest norm that is left as it is.
        norm_type: the order of the norm; may be ``inf``.
        error_if_nonfinite: raise RuntimeError if the norm is NaN or infinite.
        foreach: how torch scales the dense gradients.

    Returns:
        The norm before scaling.

    Examples:
        >>> import torch
        >>> from rowstep import clip_grad_norm_
        >>> table = torch.nn.Embedding(10, 4, sparse=True)
        >>> table(torch.tensor([1, 1])).sum().backward()  # row 1 has the gradient 2, four times
        >>> clip_grad_norm_(table.parameters(), max_norm=1.0)
        tensor(4.)
        >>> table.weight.grad.to_dense()[1]
        tensor([0.5000, 0.5000, 0.5000, 0.5000])
    """
    max_norm, norm_type = float(max_norm), float(norm_type)
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    total = _norm_over_ranks(parameters, norm_type, foreach)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients is {total.item()}, so it cannot be clipped; "
            "expected a finite norm. To scale by it anyway, set error_if_nonfinite=False"
        )
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    if factor.is_cpu and factor == 1:  # nothing to clip, and reading the factor costs no wait for a device
        return total
    # Each gradient once, even if parameters share one. All new values come first: a dense gradient, which torch scales
    # in place, may be the memory of a sparse one.
    sparse, dense = _split(list({id(param.grad): param for param in parameters}.values()))
    clipped = [(grad, _scaled(grad, factor)) for grad in sparse]
    torch.nn.utils.clip_grads_with_norm_(_as_params(dense), max_norm, total, foreach)
    for grad, entries in clipped:
        _replace(grad, entries)
    return total


@torch.no_grad()
def clip_grad_value_(parameters: Tensor | Iterable[Tensor], clip_value: float, foreach: bool | None = None) -> None:
    """Clamp every element of every gradient to [-clip_value, clip_value].

    Like torch.nn.utils.clip_grad_value_, for sparse and dense gradients. Duplicates in a sparse gradient are summed
    before clamping, so the gradient is coalesced afterwards. ``param.grad`` stays the same object.

    Args:
        parameters: a Tensor, or Tensors, whose gradients to clamp.
        clip_value: the largest absolute value that is left as it is.
        foreach: how torch clamps the dense gradients.

    Examples:
        >>> import torch
        >>> from rowstep import clip_grad_value_
        >>> table = torch.nn.Embedding(10, 2, sparse=True)
        >>> table(torch.tensor([1, 1, 3])).sum().backward()  # 2 in row 1, 1 in row 3
        >>> clip_grad_value_(table.parameters(), clip_value=1.5)
        >>> table.weight.grad.to_dense()[[1, 3]]
        tensor([[1.5000, 1.5000],
                [1.0000, 1.0000]])
    """
    clip_value = float(clip_value)
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    sparse, dense = _split(parameters)
    if sparse and not clip_value >= 0:
        raise ValueError(
            f"Invalid clip_value: {clip_value}; expected >= 0, because rows that a sparse gradient does not name stay 0"
        )
    if any(is_partial(param.grad) for param in parameters):
        raise ValueError(
            "a gradient is a DTensor with a partial placement, of which no rank has the values; expected shards or "
            "replicas. Use grad.redistribute() first"
        )
    # All sums come first: a dense gradient, which torch clamps in place, may be the memory of a sparse one.
    clamped = [(grad, _clamped_sums(grad, clip_value)) for grad in sparse]
    if dense:  # torch refuses an empty list
        _torch_clip_grad_value(_as_params(dense), clip_value, foreach=foreach)
    for grad, entries in clamped:
        _replace(grad, entries)


def _split(parameters: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The sparse gradients, and the dense ones; of a DTensor its local part."""
    grads = [param.grad for param in parameters if param.grad is not None]
    dense = [grad.to_local() if is_dtensor(grad) else grad for grad in grads if not grad.is_sparse]
    return [grad for grad in grads if grad.is_sparse], dense


def _as_params(grads: Iterable[Tensor]) -> list[Any]:
    """What torch's functions take, which look for gradients in ``grad``."""
    return [SimpleNamespace(grad=grad) for grad in grads]


def _clamped_sums(grad: Tensor, clip_value: float) -> Tensor:
    """The gradient with duplicates combined, in the dtype a step would sum them in, and then clamped."""
    _checked(grad, _backends.reference)  # coalesce trusts the indices
    indices, values = indices_of(grad), values_of(grad)
    # What claims to be coalesced may still hold duplicates.
    summed = _sparse(grad, indices, values.to(compute_dtype(grad.dtype)), is_coalesced=False).coalesce()
    clamped = summed.values().clamp(-clip_value, clip_value).to(grad.dtype)
    return _sparse(grad, summed.indices(), clamped, is_coalesced=True)


def _scaled(grad: Tensor, factor: Tensor) -> Tensor:
    values = values_of(grad)
    return _sparse(grad, indices_of(grad), values * factor.to(values.device), grad.is_coalesced())


def _sparse(grad: Tensor, indices: Tensor, values: Tensor, is_coalesced: bool) -> Tensor:
    return torch.sparse_coo_tensor(
        indices, values, grad.shape, device=values.device, is_coalesced=is_coalesced, check_invariants=False
    )


def _replace(grad: Tensor, other: Tensor) -> None:
    """Give ``grad`` the memory of ``other``. It stays the same object, and its old memory is as it was."""
    grad.data = other
    torch.autograd.graph.increment_version(grad)  # what a graph saved of it is out of date


def _norm_over_ranks(parameters: list[Tensor], norm_type: float, foreach: bool | None) -> Tensor:
    """The norm of all gradients, where those of sharded tables, and DTensors, are on several ranks."""
    by_peers: dict[Peers | None, list[Tensor]] = {}  # in one order on all ranks: the parameters'
    by_mesh: dict[DeviceMesh, list[DTensor]] = {}
    for param in parameters:
        part, grad = part_of(param), param.grad
        peers = None if part is None or part.is_everywhere else part.peers  # what every rank has whole counts once
        if grad is not None and is_dtensor(grad):
            by_mesh.setdefault(grad.device_mesh, []).append(grad)
        elif grad is not None or peers is not None:
            by_peers.setdefault(peers, []).append(param)
    if not by_mesh and not any(by_peers):
        return _total_norm(parameters, norm_type, foreach)
    if any(by_peers) and not norm_type > 0:
        raise ValueError(f"Invalid norm_type value: {norm_type}; expected > 0 with sharded tables")
    on_meshes = [MeshGradients(grads, norm_type) for grads in by_mesh.values()]
    local: dict[Any, Any] = {}

    def measure(key: Any) -> Any:
        if not local:  # all at the first call, so that whatever is wrong here, every rank hears of it
            local.update([(each, float(_total_norm(params, norm_type, foreach))) for each, params in by_peers.items()])
            local.update([(each, each.local_norms(foreach)) for each in on_meshes])
        return local.get(key)

    norms: list[float] = []
    for peers, params in by_peers.items():
        if peers is not None:
            norms += peers.gather_numbers(
                functools.partial(measure, peers), "clipping of gradients", norm_type, identities(params)
            )
    failure = None
    try:
        measure(None)
    except Exception as error:  # raised once the other ranks of the meshes know
        failure = error
    for each in on_meshes:
        norm, failed = each.norm(None if failure else measure(each))
        norms.append(norm)
        if failed and failure is None:
            failure = RuntimeError(f"clipping of gradients failed on rank {', '.join(map(str, failed))}; see its error")
    if failure is not None:
        raise failure
    norms += [local[None]] if None in by_peers else []
    total: Tensor = torch.linalg.vector_norm(
        _of_each(norms), norm_type or 1.0
    )  # those of order 0 are counts: they add up
    return total.to(parameters[0].device, compute_dtype(*(param.dtype for param in parameters)))


def _total_norm(parameters: list[Tensor], norm_type: float, foreach: bool | None) -> Tensor:
    """The norm of the gradients' norms, as torch takes it."""
    sparse, dense = _split(parameters)
    if norm_type > 0:  # torch raises for the largest number of none, as of a shard without a row
        dense = [grad for grad in dense if grad.numel()]
    if not sparse:
        return torch.nn.utils.get_total_norm(dense, norm_type, foreach=foreach)
    device, dtype = (*dense, *sparse)[0].device, compute_dtype(*(grad.dtype for grad in (*dense, *sparse)))
    gradients = [_checked(grad) for grad in sparse]
    # With a power of 0 or below, the rows that a gradient does not name count as well.
    backends = [_backends.for_gradient(each) if norm_type > 0 else _backends.reference for each in gradients]
    norms: list[Any] = [each.norm(gradient, norm_type) for each, gradient in zip(backends, gradients, strict=True)]
    # The norm of order 0 counts the tensors that are not 0, so each of them is measured by itself.
    parts = [[grad] for grad in dense] if norm_type == 0 else [dense] if dense else []
    of_dense = [torch.nn.utils.get_total_norm(part, norm_type, foreach=foreach) for part in parts]
    if any(isinstance(norm, Tensor) for norm in norms):  # on a GPU, which nobody has waited for
        each = torch.stack([torch.as_tensor(norm, dtype=torch.float64, device=device) for norm in (*norms, *of_dense)])
    else:
        each = _of_each([*norms, *map(float, of_dense)])
    total: Tensor = torch.linalg.vector_norm(each, norm_type)
    return total.to(device, dtype)


def _of_each(norms: list[float]) -> Tensor:
    return torch.tensor(norms, dtype=torch.float64, device="cpu")


def _checked(grad: Tensor, implementation: Any = None) -> RowGradient:
    """A gradient as rows; raise if one is not in its table. On a GPU only the reference waits to find out."""
    gradient = row_gradient(grad, grad.shape)
    gradient.check_memory()
    if flaw := _backends.outside(gradient, implementation):
        raise flaw
    return gradient

"""The norm of gradients that are DTensors, as those of layers under FSDP2.

torch takes that of DTensors alone, and raises on a rank that has no element of one of them. Its collectives also come
in the middle: a rank on which another gradient is wrong would never get there, and leave the others waiting. Here the
ranks of a mesh exchange what they have come to in one message, which says as well if one has failed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ._memory import is_dtensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class MeshGradients:
    """The gradients on one device mesh, in one order on all its ranks, of which a norm of this order is wanted."""

    def __init__(self, grads: Sequence[DTensor], order: float) -> None:
        """All ranks of the mesh must make this call: partial gradients are summed."""
        self._mesh, self._order = grads[0].device_mesh, order
        self._parts: dict[tuple[tuple[bool, ...], int], list[Tensor]] = {}
        """What this rank has of the gradients, by the dimensions of the mesh that they are cut along."""
        for number, grad in enumerate(map(_summed, grads)):
            is_cut = tuple(not placement.is_replicate() for placement in grad.placements)
            which = number if order == 0 else 0  # the norm of order 0 counts the tensors that are not 0
            self._parts.setdefault((is_cut, which), []).append(grad.to_local())

    def local_norms(self, foreach: bool | None) -> list[float]:
        """What the parts on this rank come to."""
        norms, measured = [], torch.nn.utils.get_total_norm
        of_nothing = math.inf if self._order < 0 else 0.0
        for parts in self._parts.values():
            there = [part for part in parts if part.numel()]
            norms.append(float(measured(there, self._order, foreach=foreach)) if there else of_nothing)
        return norms

    def norm(self, local: list[float] | None) -> tuple[float, list[int]]:
        """The norm, and the ranks that have failed, which say None. All ranks of the mesh must make this call."""
        from torch.distributed.tensor import DTensor, Shard

        mesh, said = self._mesh, [*(local or [0.0] * len(self._parts)), float(local is None)]
        mine = torch.tensor(said, dtype=torch.float64, device=mesh.device_type).view(*[1] * mesh.ndim, -1)
        along_all = [Shard(dim) for dim in range(mesh.ndim)]
        all_said = DTensor.from_local(mine, mesh, along_all, run_check=False).full_tensor().cpu()
        here: Any = mesh.get_coordinate()
        norms = []
        for number, (is_cut, _) in enumerate(self._parts):
            holders = tuple(slice(None) if cut else at for cut, at in zip(is_cut, here, strict=True))
            parts = all_said[(*holders, number)].flatten()
            norms.append(torch.linalg.vector_norm(parts, self._order or 1.0))  # counts add up
        failed = mesh.mesh[all_said[..., -1] != 0].tolist()
        return float(torch.linalg.vector_norm(torch.stack(norms), self._order)), failed


def is_partial(grad: Tensor | None) -> bool:
    """Whether this is a DTensor of which ranks hold summands."""
    return grad is not None and is_dtensor(grad) and any(each.is_partial() for each in grad.placements)


def _summed(grad: DTensor) -> DTensor:
    from torch.distributed.tensor import Replicate

    if not is_partial(grad):
        return grad
    return grad.redistribute(placements=[Replicate() if each.is_partial() else each for each in grad.placements])

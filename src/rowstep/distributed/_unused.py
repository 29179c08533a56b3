"""Empty gradients for replicated tables that this rank has not used.

DDP wants a gradient of every such table: "Expected sparse gradient to be defined". It asks for them when the first
gradient of a backward pass reaches any of its parameters. The empty ones are therefore given right before that moment,
so a program may do what it likes with gradients between its forward and backward pass. Those that no rank has used are
taken back when the pass has ended.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from .._torch_internals import after_backward, number_of_backward, parameters_of_ddp, values_of


def give_empty_gradients(wrapped: DistributedDataParallel, tables: Sequence[Tensor]) -> None:
    """From now on, these parameters have a gradient whenever this wrapper asks for it."""
    given = _EmptyGradients(tables)
    handles = []
    for param in parameters_of_ddp(wrapped):
        if param.requires_grad:
            own = param if any(param is table for table in tables) else None
            node = get_gradient_edge(param).node  # the wrapper keeps it, and with it the hook
            handles.append(node.register_prehook(lambda grads, own=own: given.before_accumulation(own, grads)))
    weakref.finalize(wrapped, _remove, handles)  # another wrapper may keep the nodes


def _remove(handles: Iterable[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


class _EmptyGradients:
    def __init__(self, tables: Sequence[Tensor]) -> None:
        self._tables = tables
        self._given: list[tuple[Tensor, Tensor]] = []  # still there if a backward pass has raised
        self._backward = -1  # the number of the pass they were given in

    def before_accumulation(self, table: Tensor | None, grads: Sequence[Any]) -> None:
        """A gradient is about to be added to a parameter, which may be one of the tables."""
        if self._backward != (running := number_of_backward()):
            self._give()
            self._backward = running
        if table is not None and grads[0] is not None and any(table.grad is empty for _, empty in self._given):
            table.grad = None  # torch takes the new gradient as it is, and need not copy it

    def _give(self) -> None:
        for table in self._tables:
            if table.grad is None:
                table.grad = _without_entries(table)
                self._given.append((table, table.grad))
        # What is queued now runs before DDP's own work at the end of the pass, what is queued then runs after it.
        after_backward(lambda: after_backward(self._take_back))

    def _take_back(self) -> None:
        for table, empty in self._given:
            if table.grad is empty and not len(values_of(empty)):
                table.grad = None
        self._given.clear()


def _without_entries(table: Tensor) -> Tensor:
    return torch.sparse_coo_tensor(
        torch.empty(1, 0, dtype=torch.int64, device=table.device),
        torch.empty(0, *table.shape[1:], dtype=table.dtype, device=table.device),
        table.shape,
        check_invariants=False,
    )

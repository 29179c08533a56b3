"""Put a changed table and its state in the place of the old ones: wholly or not at all, and seen by autograd.

Autograd gives a parameter one node that collects its gradient. It lives as long as any graph that ends in it (the
``loss`` of the last step is enough), and it remembers the shape that the parameter had. So a changed table gets a new
node: graphs from now on know its shape. Graphs from before end in the old node, which refuses: their gradients name
rows as they were.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Iterable, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge, increment_version
from torch.nn.parallel import DistributedDataParallel

from ._memory import is_in_file
from ._state import State


def replace_table(param: Tensor, table: Tensor, state: State, changed: State) -> None:
    """Make ``table`` the data of ``param`` and ``changed`` a part of its state; drop the gradient of the old rows.

    Whatever is raised on the way, an interrupt too, leaves parameter, state and gradient as they were.
    """
    if is_in_file(param) or any(map(is_in_file, (state[key] for key in changed))):
        raise RuntimeError(
            "the table or its state is in a file, whose rows are fixed; expected a table in memory. Copy the rows to "
            "keep into files of another shape, by rowstep.storage.create"
        )
    if is_averaged(param):
        gc.collect()  # a wrapper that nobody uses any more may still be there
    renew = not is_averaged(param)  # the wrapper has hooks on the old node
    if not renew and table.shape != param.shape:
        raise RuntimeError(
            f"the parameter belongs to a DistributedDataParallel that was created when it had {len(param)} rows; "
            "expected an unwrapped model. Take its .module, drop the wrapper, change the table on every rank, and wrap "
            "it again"
        )
    old_table, old_grad, old_state = param.data, param.grad, {key: state[key] for key in changed}
    moved: list[bool] = []
    try:
        if renew:
            if param.requires_grad:
                refuse = functools.partial(_refuse_if, moved, tuple(param.shape))
                get_gradient_edge(param).node.register_prehook(refuse)
            # Autograd drops its node when the dtype changes, and only then.
            param.data = param.new_empty(0, dtype=torch.float32 if param.dtype == torch.float64 else torch.float64)
        param.grad = None
        param.data = table
        state.update(changed)
        moved.append(True)
    except BaseException:
        moved.clear()
        param.grad = None
        param.data = old_table
        param.grad = old_grad
        state.update(old_state)
        raise
    increment_version(param)  # for graphs that have saved the table itself, as a linear layer's


def _refuse_if(moved: list[bool], shape: tuple[int, ...], _: Any) -> None:
    if moved:
        raise RuntimeError(
            f"the rows of a table of shape {shape} were moved, added or dropped after this forward pass read them; "
            "expected the backward pass before such a change. Change tables between optimizer.step() and the next "
            "forward pass, or rerun the forward pass"
        )


_wrappers: MutableMapping[int, DistributedDataParallel] = weakref.WeakValueDictionary()
"""By the id of a parameter, which the wrapper keeps alive. Not an attribute of it, which would be pickled with it."""

_wrappers_of_tables: MutableMapping[int, DistributedDataParallel] = weakref.WeakValueDictionary()


def note_ddp(wrapper: DistributedDataParallel, params: Iterable[Tensor], tables: Iterable[Tensor]) -> None:
    """Note that this wrapper averages the gradients of these parameters, of which some are tables."""
    _wrappers.update((id(param), wrapper) for param in params)
    _wrappers_of_tables.update((id(table), wrapper) for table in tables)


def is_averaged_table(param: Tensor) -> bool:
    """Whether ``rowstep.distributed.ddp`` averages its gradients, which are sparse: before there is one, it tells."""
    return id(param) in _wrappers_of_tables


def is_averaged(param: Tensor) -> bool:
    """Whether ``rowstep.distributed.ddp`` averages its gradients, which then name rows that other ranks have read.

    torch's own DistributedDataParallel leaves no trace on a parameter, and is not seen.
    """
    return id(param) in _wrappers

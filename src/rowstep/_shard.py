"""A parameter that is one rank's part of a table: what the optimizers and clipping need to know of it.

It is a plain local Parameter, because DTensor has no sparse gradients. What it is a part of is written beside it, as an
attribute of the Parameter. To the outside, in state dicts, it is a DTensor over the same memory, which torch's
checkpoints can cut anew for another number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import StateDict

from ._layout import RowOrder
from ._state import State

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_MARK = "_rowstep_shard"

ROW_ORDER = "rowstep_row_order"
"""The key under which state dicts keep the order of a table's rows, beside every tensor that is laid out in it."""


@dataclass(eq=False)
class Shard:
    """Rows ``positions`` of a table that is laid out in ``order``, and the ranks that hold the others."""

    order: RowOrder
    positions: range
    group: ProcessGroup | None
    """None in a single process without torch.distributed."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Shard:
        return Shard(self.order, self.positions, self.group)  # a process group cannot be copied

    @property
    def order_as_tensor(self) -> Tensor:
        return torch.tensor(self.order, device="cpu")

    def holds(self, value: object) -> bool:
        """Whether this is a tensor of the rows that this rank has."""
        return isinstance(value, Tensor) and value.dim() > 0 and len(value) == len(self.positions)

    def as_global(self, local: Tensor) -> Tensor:
        """The whole table's tensor, of which ``local`` is this rank's part; no copy is made."""
        if self.group is None:
            return local
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor import Shard as Cut

        shape = torch.Size((self.order.rows, *local.shape[1:]))
        stride = torch.empty(shape, device="meta").stride()
        mesh = _mesh(self.group, local.device.type)
        return DTensor.from_local(local, mesh, [Cut(0)], run_check=False, shape=shape, stride=stride)

    def order_of(self, constants: object, value: object) -> RowOrder:
        """The order of a loaded tensor, from the constants that came with it, if any.

        Blocks that came without are ours, since only we make them. Whole tables that came without were never sharded.
        """
        if constants is not None:
            return RowOrder.loaded(constants, self.order.rows)
        return self.order if _is_in_blocks(value) else RowOrder.by_id(self.order.rows)

    def as_local(self, value: Tensor, order: RowOrder) -> Tensor:
        """This rank's rows of a whole table's tensor, which is laid out in ``order``; of its own blocks, a view."""
        from torch.distributed.tensor import DTensor

        if value.shape[:1] != (self.order.rows,):
            raise ValueError(f"a tensor of shape {tuple(value.shape)} was loaded for a table of {self.order.rows} rows")
        if isinstance(value, DTensor):
            if order == self.order and _is_in_blocks(value):
                return value.to_local()
            from .distributed import _exchange

            value = _exchange.whole(value)
        if order == self.order:
            return value[self.positions.start : self.positions.stop].clone()  # and let go of the rest
        positions = torch.arange(self.positions.start, self.positions.stop, device=value.device)
        return value.index_select(0, order.positions(self.order.ids(positions)))


def mark(param: Tensor, shard: Shard) -> None:
    """Note that ``param`` is this part of a table."""
    setattr(param, _MARK, shard)


def shard_of(param: Tensor) -> Shard | None:
    """What this parameter is a part of, or None if it is whole."""
    return getattr(param, _MARK, None)


def as_global_state(state: State, param: Tensor) -> State:
    """A parameter's optimizer state as it goes into a state dict."""
    shard = shard_of(param)
    if shard is None:
        return state
    rows = {key: shard.as_global(value) for key, value in state.items() if shard.holds(value)}
    return state | rows | {ROW_ORDER: shard.order_as_tensor}


def as_local_state(state: State, param: Tensor) -> State:
    """What of a loaded state belongs to this parameter, be it a part of a table or a whole one."""
    shard, order = shard_of(param), state.get(ROW_ORDER)
    if shard is None and order is None:
        return state
    if shard is None:
        shard = Shard(RowOrder.by_id(len(param)), range(len(param)), None)
    rows = shard.order.rows
    local = {key: value for key, value in state.items() if key != ROW_ORDER}
    for key, value in local.items():
        if isinstance(value, Tensor) and value.shape[:1] == (rows,):
            local[key] = shard.as_local(value, shard.order_of(order, value))
    return local


def for_each_param(state_dict: StateDict, params: list[Tensor], change: Callable[[State, Tensor], State]) -> StateDict:
    """A copy of an optimizer's state dict in which ``change`` has been applied to the state of every parameter."""
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    states = dict(state_dict["state"])
    for number, param in zip(numbers, params, strict=False):  # torch itself complains if there are more or fewer
        # torch.distributed.checkpoint reads what is not a tensor back under the text of a number: 0 becomes "0".
        read_back = states.pop(str(number), {}) if isinstance(number, int) else {}
        if number in states:
            states[number] = change(states[number] | read_back, param)
    return state_dict | {"state": states}


def _is_in_blocks(value: object) -> bool:
    """Whether this is a whole table's tensor of which every rank has its own rows."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor import Shard as Cut

    return isinstance(value, DTensor) and value.placements == (Cut(0),)


def _mesh(group: ProcessGroup, device_type: str) -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh.from_group(group, device_type)

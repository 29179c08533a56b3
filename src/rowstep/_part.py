"""A parameter that is one rank's part of a table: what the optimizers and clipping need to know of it.

It is a plain local Parameter, because DTensor has no sparse gradients. What it is a part of is written beside it, as an
attribute of the Parameter. To the outside, in state dicts, it is a DTensor over the same memory, which torch's
checkpoints can cut anew for another number of ranks.

The core imports nothing of ``rowstep.distributed``. What takes messages between ranks, it asks of the part's ``Peers``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.optim.optimizer import StateDict

from ._backends import WHOLE, Extent
from ._layout import RowOrder
from ._state import State, row_slots

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_MARK = "_rowstep_part"

ROW_ORDER = "rowstep_row_order"
"""The key under which state dicts keep the order of a table's rows, beside every tensor that is laid out in it."""


class Peers(Protocol):
    """The ranks that hold the parts of a table, this one included. They are equal where their group is the same."""

    @property
    def group(self) -> ProcessGroup:
        """The ranks as torch knows them."""

    def gather_numbers(self, measure: Callable[[], float]) -> list[float]:
        """What every rank measures. If that raises on some rank, all ranks raise."""

    def sum(self, local: Tensor) -> Tensor:
        """The sum of every rank's tensor of this shape, the same on all ranks."""

    def before_step(self) -> None:
        """Raise on all ranks if only some of them have run the backward pass of a lookup."""


@dataclass(eq=False)
class TablePart:
    """Rows ``positions`` of a table that is laid out in ``order``, and the ranks that hold the others."""

    order: RowOrder
    positions: range
    peers: Peers | None
    """None in a single process without torch.distributed."""

    @property
    def order_as_tensor(self) -> Tensor:
        return torch.tensor(self.order, device="cpu")

    def as_global(self, local: Tensor) -> Tensor:
        """The whole table's tensor, of which ``local`` is this rank's part; no copy is made."""
        if self.peers is None:
            return local
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import DTensor, Shard

        shape = torch.Size((self.order.rows, *local.shape[1:]))
        stride = torch.empty(shape, device="meta").stride()
        mesh = DeviceMesh.from_group(self.peers.group, local.device.type)
        return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)

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
            raise ValueError(
                f"the loaded tensor has shape {tuple(value.shape)}; expected all {self.order.rows} rows of the table, "
                "as state_dict() returns them"
            )
        if isinstance(value, DTensor):
            if order == self.order and _is_in_blocks(value):
                return value.to_local()
            value = value.full_tensor()  # it knows its ranks: a parameter that is whole has no peers to ask
        if order == self.order:
            return value[self.positions.start : self.positions.stop].clone()  # and let go of the rest
        positions = torch.arange(self.positions.start, self.positions.stop, device=value.device)
        return value.index_select(0, order.positions(self.order.ids(positions)))


def peers_of(params: Iterable[Tensor]) -> list[Peers]:
    """The ranks with which these parameters share tables, each group once."""
    parts = [part for param in params if (part := part_of(param)) is not None]
    return list(dict.fromkeys(part.peers for part in parts if part.peers is not None))


def summed_over_ranks(param: Tensor, local: Tensor) -> Tensor:
    """The sum over all parts of a parameter's table of something that each rank has measured on its own part."""
    part = part_of(param)
    return local if part is None or part.peers is None else part.peers.sum(local)


def extent_of(param: Tensor) -> Extent:
    """Which rows of a table this parameter holds, as random rounding has to know."""
    part = part_of(param)
    if part is None:
        return WHOLE
    rows, multiplier, offset = part.order
    if rows == 0:
        return WHOLE
    return Extent((part.positions.start - offset) % rows, pow(multiplier, -1, rows) if rows > 1 else 1, rows)


def mark(param: Tensor, part: TablePart) -> None:
    """Note that ``param`` is this part of a table."""
    setattr(param, _MARK, part)


def part_of(param: Tensor) -> TablePart | None:
    """What this parameter is a part of, or None if it is whole."""
    return getattr(param, _MARK, None)


def as_global_state(state: State, param: Tensor) -> State:
    """A parameter's optimizer state as it goes into a state dict."""
    part = part_of(param)
    if part is None:
        return state
    return state | {key: part.as_global(state[key]) for key in row_slots(state)} | {ROW_ORDER: part.order_as_tensor}


def as_local_state(state: State, param: Tensor) -> State:
    """What of a loaded state belongs to this parameter, be it a part of a table or a whole one."""
    part, order = part_of(param), state.get(ROW_ORDER)
    if part is None and order is None:
        return state
    if part is None:
        part = TablePart(RowOrder.by_id(len(param)), range(len(param)), peers=None)
    local = {key: value for key, value in state.items() if key != ROW_ORDER}
    return local | {key: part.as_local(local[key], part.order_of(order, local[key])) for key in row_slots(local)}


def for_each_param(state_dict: StateDict, params: list[Tensor], change: Callable[[State, Tensor], State]) -> StateDict:
    """A copy of an optimizer's state dict in which ``change`` has been applied to the state of every parameter."""
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    states = dict(state_dict["state"])
    for number, param in zip(numbers, params, strict=False):  # torch itself complains if there are more or fewer
        # torch.distributed.checkpoint reads what is not a tensor back under the text of a number: 0 becomes "0".
        read_back = states.pop(str(number), {}) if isinstance(number, int) else {}
        if number in states:
            states[number] = change(states[number] | read_back if read_back else states[number], param)
    return state_dict | {"state": states}


def _is_in_blocks(value: object) -> bool:
    """Whether this is a whole table's tensor of which every rank has its own rows."""
    from torch.distributed.tensor import DTensor, Shard

    return isinstance(value, DTensor) and value.placements == (Shard(0),)

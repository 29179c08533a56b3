"""A parameter that is one rank's part of a table: what the optimizers and clipping need to know of it.

It is a plain local Parameter, because DTensor has no sparse gradients. What it is a part of is written beside it, as an
attribute of the Parameter. To the outside, in state dicts, it is a DTensor over the same memory, which torch's
checkpoints can cut anew for another number of ranks. Its shape there says in which order the rows lie (``_layout``).

The core imports nothing of ``rowstep.distributed``. What takes messages between ranks, it asks of the part's ``Peers``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import StateDict

from ._layout import RowOrder, is_spread
from ._memory import is_dtensor
from ._state import SLOTS, State, row_slots

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_MARK = "_rowstep_part"

ROW_ORDER = "rowstep_row_order"
"""The key under which state dicts keep the order of a table's rows, beside every tensor that is laid out in it."""


Peers = Any
"""The ranks that hold the parts of a table, this one included: a ``GroupPeers`` of ``rowstep.distributed``."""


@dataclass(eq=False)
class TablePart:
    """Rows ``positions`` of a table that is laid out in ``order``, and the ranks that hold the others."""

    order: RowOrder
    positions: range
    peers: Peers
    """None in a single process without torch.distributed."""
    is_everywhere: bool = False
    """Whether every rank has the whole table, instead of a part of it."""
    identity: tuple[int, ...] = ()
    """Table id, identical on all ranks."""

    @property
    def order_as_tensor(self) -> Tensor:
        return torch.tensor(self.order, device="cpu")

    def as_global(self, local: Tensor) -> Tensor:
        """The whole table's tensor, of which ``local`` is this rank's part; no copy is made."""
        shape = torch.Size(self.order.shape_in_state_dicts((self.order.rows, *local.shape[1:])))
        while local.dim() < len(shape):
            local = local.unsqueeze(-1)
        if self.peers is None or self.is_everywhere:
            return local
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import DTensor, Shard

        stride = torch.empty(shape, device="meta").stride()
        mesh = DeviceMesh.from_group(self.peers.live_group, local.device.type)
        return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)

    def as_local(self, value: Tensor, constants: object = None, dim: int = 2) -> Tensor:
        """This rank's rows of a whole table's tensor; of a DTensor that is cut as the table is, a view.

        Args:
            value: as it is in a state dict.
            constants: of the order of its rows, if any came with it.
            dim: how many dimensions the tensor has here: 2, or 1 with a number per row.
        """
        if value.shape[:1] != (self.order.rows,) or (is_spread(value.shape) and value.shape[dim:].numel() != 1):
            raise ValueError(
                f"the loaded tensor has shape {tuple(value.shape)}; expected all {self.order.rows} rows of the table, "
                "as state_dict() returns them"
            )
        order = RowOrder.of(value.shape, constants, self.order.rows)
        if is_dtensor(value):
            local = value.to_local()
            if local.dim() != value.dim():  # torch has put a block into a place of another shape
                raise ValueError(
                    f"the loaded DTensor has shape {tuple(value.shape)}, but {tuple(local.shape)} on this rank; "
                    "expected the same dimensions"
                )
            if order == self.order and self._is_cut_as(value):
                _refuse_other_ranks_rows(value)
                return _as_in_models(local, dim)
            value = _whole(value, self.peers)
        value = _as_in_models(value, dim)
        if order == self.order:
            return value[self.positions.start : self.positions.stop].clone()  # and let go of the rest
        positions = torch.arange(self.positions.start, self.positions.stop, device=value.device)
        return value.index_select(0, order.positions(self.order.ids(positions)))

    def _is_cut_as(self, value: DTensor) -> bool:
        """Whether what this rank holds of a DTensor are the rows of this part."""
        from torch.distributed import get_process_group_ranks

        if self.peers is None or not (len(value.placements) == 1 and value.placements[0].is_shard(0)):
            return False
        return bool(value.device_mesh.mesh.tolist() == get_process_group_ranks(self.peers.live_group))


def peers_of(params: Iterable[Tensor]) -> list[Peers]:
    """The ranks with which these parameters share tables, each group once."""
    parts = [part for param in params if (part := part_of(param)) is not None]
    return list(dict.fromkeys(part.peers for part in parts if part.peers is not None))


def identities(params: Iterable[Tensor]) -> list[tuple[int, ...]]:
    """The ids of the tables of these parameters, identical on all ranks."""
    return [part.identity for param in params if (part := part_of(param)) is not None]


def mark(param: Tensor, part: TablePart) -> None:
    """Note that ``param`` is this part of a table."""
    setattr(param, _MARK, part)


def part_of(param: Tensor) -> TablePart | None:
    """What this parameter is a part of, or None if it is whole."""
    return getattr(param, _MARK, None)


def is_spread_part(param: Tensor) -> bool:
    """Whether this parameter's rows lie in another order than that of the ids."""
    part = part_of(param)
    return part is not None and not part.order.is_by_id


def as_global_state(state: State, param: Tensor) -> State:
    """A parameter's optimizer state as it goes into a state dict."""
    part = part_of(param)
    if part is None:
        return state
    constants = {} if part.order.is_by_id else {ROW_ORDER: part.order_as_tensor}
    return state | {key: part.as_global(state[key]) for key in row_slots(state)} | constants


def as_local_state(state: State, param: Tensor) -> State:
    """The part of a loaded state that belongs to this parameter, which may be a part of a table or a whole one.

    A state for a whole parameter that came without constants was never spread, whatever its shape.
    """
    # torch makes empty dicts of what a flattened state dict lacks.
    state = {key: value for key, value in state.items() if not (isinstance(value, dict) and not value)}
    part, constants = part_of(param), state.get(ROW_ORDER)
    if part is None and constants is None:
        cut = [] if is_dtensor(param) else [key for key in row_slots(state) if is_dtensor(state[key])]
        return state | {key: _whole(state[key]) for key in cut}
    if part is None:
        part = TablePart(RowOrder.by_id(len(param)), range(len(param)), peers=None)
    local = {key: value for key, value in state.items() if key != ROW_ORDER}
    for key in row_slots(local):
        local[key] = part.as_local(local[key], constants, dim=1 if SLOTS[key].is_per_row else 2)
    return local


def for_each_param(state_dict: StateDict, params: list[Tensor], change: Callable[[State, Tensor], State]) -> StateDict:
    """A copy of an optimizer's state dict in which ``change`` has been applied to the state of every parameter."""
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    states = dict(state_dict["state"])
    for number, param in zip(numbers, params, strict=False):  # torch itself complains if there are more or fewer
        # torch.distributed.checkpoint reads what is not a tensor back under the text of a number: 0 becomes "0".
        read_back = states.pop(str(number), {}) if isinstance(number, int) else {}
        if number in states:
            states[number] = change(states[number] | read_back if read_back else states[number], param)
            if not states[number]:
                del states[number]
    return state_dict | {"state": states}


def _whole(value: DTensor, peers: Peers = None) -> Tensor:
    """All rows of a DTensor. It knows its ranks, which call this together: a parameter that is whole has no peers."""
    mesh = value.device_mesh
    if mesh.size() == 1:
        return value.to_local()

    def check() -> float:
        _refuse_other_ranks_rows(value)
        try:
            sizes = [group.size() for group in mesh.get_all_groups()]
        except (LookupError, RuntimeError, ValueError):  # there is no group of the name that the saved one had
            sizes = []
        if sizes != list(mesh.shape):
            raise ValueError(f"the loaded tensor holds the rows of one rank of {mesh.size()}; expected {_ALL_ROWS}")
        return 0.0

    if peers is None:
        check()
    else:
        peers.gather_numbers(check, "loading of a table")  # so that none waits for ranks that raise
    return value.full_tensor()


_ALL_ROWS = (
    "all rows, or this rank's. A file by torch.save has only the rows of the rank that wrote it: save with "
    "torch.distributed.checkpoint, which any number of ranks can load, or save full_weight() or to_embedding(). Or let "
    "each rank save a file and load its own, on as many ranks"
)


def _refuse_other_ranks_rows(value: DTensor) -> None:
    """Raise if a DTensor comes from a file that another rank has written: torch takes its rows for this rank's."""
    import torch.distributed as dist

    mesh = value.device_mesh
    rank = dist.get_rank() if dist.is_initialized() else None
    writer = None if (place := mesh.get_coordinate()) is None else int(mesh.mesh[tuple(place)])
    if rank is None or rank != writer:
        here = "a process without ranks" if rank is None else f"rank {rank}"
        raise ValueError(f"the loaded tensor holds the rows of rank {writer}, and this is {here}; expected {_ALL_ROWS}")


def _as_in_models(value: Tensor, dim: int) -> Tensor:
    """A view without the dimensions that say in which order the rows lie."""
    return value.flatten(dim - 1) if is_spread(value.shape) else value

"""Read checkpoints of torch.distributed.checkpoint whose tables are laid out in another order than here.

Saving needs nothing of ours: state dicts hold a table's weights and moments as DTensors over the local memory, and
``dcp.save`` and ``dcp.async_save`` write them. Nor does ``dcp.load`` where tables are sharded on both sides: their rows
lie in the same order for any number of ranks, and torch cuts them anew.

A table that was never sharded lies in the order of its ids, which ``dcp.load`` refuses by its shape (``_layout``).
``load`` reads either into either: rows that lie in another order are read chunk by chunk, and put where they belong.
The constants of a spread order are beside its tensors, under the key ``rowstep_row_order``.
"""

from __future__ import annotations

import copy
import itertools
import os
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, create_default_local_load_plan
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.tensor import DTensor, zeros

from .._layout import RowOrder, blocks, is_spread
from .._optimizer import RowOptimizer
from .._part import ROW_ORDER
from .._state import SLOTS
from . import _exchange
from ._operation import Operation

_PER_ROW = frozenset(name for name, slot in SLOTS.items() if slot.is_per_row)
_LOADING = Operation("loading of a checkpoint")


def load(
    state_dict: dict[str, Any],
    checkpoint_id: str | os.PathLike[str] | None = None,
    *,
    storage_reader: StorageReader | None = None,
    process_group: ProcessGroup | None = None,
    no_dist: bool = False,
    allow_partial_load: bool = False,
) -> None:
    """``torch.distributed.checkpoint.load``, for checkpoints of both sharded and unsharded tables.

    ``load({"model": model, "optimizer": optimizer}, path)`` loads what
    ``dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=path)`` wrote. Each side may be sharded over any
    number of ranks, or unsharded. You can pass state dicts instead, as to torch's own ``load``. An entry missing from
    the checkpoint raises, or stays unchanged with ``allow_partial_load``.

    Optimizers need not have stepped yet. State that the checkpoint's options need (``row_step``, ``max_exp_avg_sq``) is
    loaded even if the optimizer was created with other options; ``second_moment`` has to be the same, or ``"row"``. If
    the checkpoint has no ``row_step``, the counts start from the history that the moments show.

    Everything is read before anything changes: if a rank cannot read its part, all ranks raise, and models and
    optimizers are as before. This takes the memory of what is loaded a second time.

    Args:
        state_dict: models, optimizers or state dicts, by name. They are loaded in place.
        checkpoint_id: the folder of the checkpoint.
        storage_reader: reads it, in place of torch's FileSystemReader.
        process_group: the ranks that load together; by default all.
        no_dist: load in this process alone.
        allow_partial_load: let entries that the checkpoint lacks stay unchanged.

    Examples:
        >>> import tempfile, warnings
        >>> import torch
        >>> import torch.distributed.checkpoint as dcp
        >>> from rowstep.distributed import ShardedEmbedding, load
        >>> sharded, plain = ShardedEmbedding(100, 8), torch.nn.Embedding(100, 8)
        >>> with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        ...     warnings.simplefilter("ignore")  # torch warns of a single process
        ...     _ = dcp.save({"table": sharded}, checkpoint_id=folder)
        ...     load({"table": plain}, folder)
        >>> torch.equal(sharded.full_weight(), plain.weight)
        True
    """
    if storage_reader is None:
        if checkpoint_id is None:
            raise ValueError("neither checkpoint_id nor storage_reader was given; expected one of them")
        storage_reader = FileSystemReader(checkpoint_id)
    storage_reader.reset(checkpoint_id)
    group = None if no_dist else _exchange.default_group(process_group)
    constants = _exchange.agree(_LOADING, lambda: _saved_constants(storage_reader), group)
    options = {"checkpoint_id": checkpoint_id, "process_group": process_group, "no_dist": no_dist}
    copies = {key: copy.deepcopy(_state_dict_of(value)) for key, value in state_dict.items()}
    _load_by_torch(copies, storage_reader, planner=_Planner(constants, allow_partial_load), **options)
    # Every rank has read everything. Optimizers first: they look at all of it before they change.
    for key in sorted(state_dict, key=lambda key: (not isinstance(state_dict[key], RowOptimizer), key)):
        value = state_dict[key]
        if isinstance(value, Stateful):
            value.load_state_dict(copies.pop(key))
        else:
            state_dict[key] = _write_into(value, copies.pop(key))


def _load_by_torch(state_dict: dict[str, Any], reader: StorageReader, **options: Any) -> None:
    with warnings.catch_warnings():  # of a single process
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        dcp_load(state_dict, storage_reader=reader, **options)


def _state_dict_of(value: Any) -> Any:
    """What torch loads into. An optimizer that has no state yet has a complete one here, and still none itself."""
    if not isinstance(value, RowOptimizer):
        return value.state_dict() if isinstance(value, Stateful) else value
    fresh = [param for param in value._all_params() if not value.state.get(param)]
    try:
        value.allocate_state()
        return value.state_dict()
    finally:
        for param in fresh:
            value.state.pop(param, None)  # a frozen one has got none


def _write_into(own: Any, loaded: Any) -> Any:
    """A state dict with what was loaded, in place wherever it fits."""
    if isinstance(own, dict) and isinstance(loaded, dict):
        made = {key: _write_into(own.get(key), value) for key, value in loaded.items()}
        own.clear()
        own.update(made)
    elif isinstance(own, list) and isinstance(loaded, list):
        own[:] = [_write_into(*each) for each in itertools.zip_longest(own[: len(loaded)], loaded)]
    elif (
        isinstance(own, Tensor)
        and isinstance(loaded, Tensor)
        and own.shape == loaded.shape
        and own.dtype == loaded.dtype
    ):
        own.detach().copy_(loaded)
    else:
        return loaded
    return own


def _saved_constants(reader: StorageReader) -> dict[str, Tensor]:
    """For every place in the checkpoint that has them, the constants of its order of rows."""
    keys = [key for key in reader.read_metadata().state_dict_metadata if key.split(".")[-1] == ROW_ORDER]
    constants: dict[str, Any] = {key: torch.zeros(len(RowOrder._fields), dtype=torch.int64) for key in keys}
    _load_by_torch(constants, reader, no_dist=True)
    return {_place(key): value for key, value in constants.items()}


def _place(key: str) -> str:
    """Where in the state dict this key is: the keys beside it have the same."""
    return key.rpartition(".")[0]


class _Planner(DefaultLoadPlanner):
    """Torch's plan, except for tables whose rows lie in another order in the checkpoint: those are put into place."""

    def __init__(self, saved: dict[str, Tensor], allow_partial_load: bool) -> None:
        super().__init__(allow_partial_load=allow_partial_load)
        self._saved = saved

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        assert metadata is not None
        self._written = metadata.state_dict_metadata
        self._match_state(state_dict, "")
        super().set_up_planner(state_dict, metadata, is_coordinator)
        self._own: dict[str, Tensor] = {}
        for key in [key for key in self.state_dict if key.split(".")[-1] == ROW_ORDER]:
            self._own[_place(key)] = self.state_dict.pop(key)  # ours stay; only rows are read
        for key, path in self.mappings.items():
            if key not in self._written and any(str(part).startswith("param_groups") for part in path):
                self.state_dict.pop(key, None)  # torch's own groups lack our options: those stay as they are

    def _match_state(self, nested: dict[Any, Any], place: str) -> None:
        """Make optimizer state have what the checkpoint has: it depends on options, which the checkpoint brings too."""
        for key, value in list(nested.items()):
            written, (_, _, name) = self._written.get(f"{place}{key}"), str(key).rpartition(".")
            if isinstance(value, dict):
                self._match_state(value, f"{place}{key}.")
            elif isinstance(value, (int, float)) and isinstance(written, TensorStorageMetadata):
                # A step counts as an int or as a Tensor, depending on the class that wrote it: take what there is.
                nested[key] = torch.zeros(written.size, dtype=written.properties.dtype)
            elif name in ("exp_avg_sq", "exp_avg_sq_row"):
                self._match_slots(nested, place, str(key).removesuffix(name), beside=value)

    def _match_slots(self, nested: dict[Any, Any], place: str, prefix: str, beside: Tensor) -> None:
        own, saved = nested.get(prefix + ROW_ORDER), self._saved.get(f"{place}{prefix}"[:-1])
        for key in (prefix + name for name in SLOTS):
            here, written = nested.get(key), self._written.get(place + key)
            if not isinstance(written, TensorStorageMetadata):
                if here is not None and not self.allow_partial_load:
                    del nested[key]
            elif not isinstance(here, Tensor) or here.dtype != written.properties.dtype:  # it is read without a cast
                shape: Sequence[int] = written.size
                if own is not None or saved is not None:
                    order = RowOrder.of(beside.shape, own, written.size[0])
                    shape = order.shape_in_state_dicts(_shape_in_models(key, written.size))
                nested[key] = _zeros(shape, written.properties.dtype, beside)

    def _is_table(self, key: str) -> bool:
        """Whether this has the rows of a table that is sharded here, or was where it was saved."""
        place, _, name = key.rpartition(".")
        return (place in self._own or place in self._saved) and name in ("weight", *SLOTS)

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        chunks: list[ReadItem] = []
        self._moved: dict[str, tuple[RowOrder, RowOrder]] = {}
        """Tensors whose rows lie in another order here: the order in the checkpoint, and the one here."""
        for key, here in self.state_dict.items():
            there = self._written.get(key)
            if not self._is_table(key) or not isinstance(there, TensorStorageMetadata):
                continue
            orders = self._orders(key, there.size, here.shape)
            if orders[0] != orders[1]:
                self._moved[key] = orders
                whole = ChunkStorageMetadata(torch.Size([0] * len(there.size)), there.size)
                chunks += create_read_items_for_chunk_list(key, there, [whole])
        rest = {key: value for key, value in self.state_dict.items() if key not in self._moved}
        plan = create_default_local_load_plan(rest, self.metadata, strict=not self.allow_partial_load)
        plan.items.extend(chunks)
        return plan

    def _orders(self, key: str, there: torch.Size, here: torch.Size) -> tuple[RowOrder, RowOrder]:
        if _shape_in_models(key, there) != _shape_in_models(key, here):
            raise ValueError(f"{key} was saved with shape {tuple(there)}; expected {tuple(here)}")
        place, rows = _place(key), here[0]
        return RowOrder.of(there, self._saved.get(place), rows), RowOrder.of(here, self._own.get(place), rows)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        key = read_item.dest_index.fqn
        if key not in self._moved:
            return super().resolve_tensor(read_item)  # type: ignore[no-any-return]
        return torch.empty(read_item.lengths, dtype=self.state_dict[key].dtype)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        key = read_item.dest_index.fqn
        if key not in self._moved:
            return
        saved, own = self._moved[key]
        first, *offsets = read_item.dest_offsets
        positions = own.positions(saved.ids(torch.arange(first, first + len(tensor))))
        local, mine = _local_block(self.state_dict[key])
        kept = (positions >= mine.start) & (positions < mine.stop)
        chunk = zip(range(1, local.dim()), offsets, tensor.shape[1:], strict=False)
        for dim, offset, length in chunk:  # a table that was cut by columns comes in parts of rows
            local = local.narrow(dim, offset, length)
        rows = tensor.reshape(len(tensor), *local.shape[1:])[kept]
        local[(positions[kept] - mine.start).to(local.device)] = rows.to(local.device)


def _shape_in_models(key: str, shape: torch.Size) -> torch.Size:
    """The shape that a table's tensor has in a plain model, from its shape in any state dict."""
    dim = 1 if key.rpartition(".")[2] in _PER_ROW else 2
    return shape[:dim] if is_spread(shape) and shape[dim:].numel() == 1 else shape


def _local_block(value: Tensor) -> tuple[Tensor, range]:
    """The memory of this rank, and the rows of the whole that it holds."""
    if not isinstance(value, DTensor):
        return value.detach(), range(len(value))
    mesh = value.device_mesh
    return value.to_local().detach(), blocks(len(value), mesh.size())[mesh.get_local_rank()]


def _zeros(shape: Sequence[int], dtype: torch.dtype, beside: Tensor) -> Tensor:
    """On the device of a tensor of the same parameter, and cut as that one is."""
    if isinstance(beside, DTensor):
        return zeros(shape, dtype=dtype, device_mesh=beside.device_mesh, placements=beside.placements)
    return torch.zeros(shape, dtype=dtype, device=beside.device)

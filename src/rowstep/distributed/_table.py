"""What both sharded tables share: a module that holds this rank's rows, and how those are filled, read and saved."""

from __future__ import annotations

import dataclasses
import itertools
import zlib
from typing import Any, ClassVar, Generic, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F  # noqa: N812  # as torch's own documents have it

from .._ids import outside_error
from .._layout import RowOrder, blocks
from .._memory import is_dtensor
from .._part import ROW_ORDER, TablePart, mark
from . import _exchange
from ._lookup import Arguments, JointLookup
from ._operation import Identity, Operation, new_identity

_Plain = TypeVar("_Plain", bound=nn.Embedding | nn.EmbeddingBag)
_Table = TypeVar("_Table", bound="ShardedTable[Any]")

DIVIDED, EVERYWHERE = "divided", "everywhere"

# Fresh rows are drawn in chunks of positions, each from a seed of its own, so that they do not depend on the ranks.
_ROWS_PER_SEED = 4096


class ShardedTable(nn.Module, Generic[_Plain]):
    """A table whose rows are sharded over the ranks of a process group."""

    plain: type[_Plain]
    """Torch's module, for a table that one process holds."""

    settings: ClassVar[tuple[str, ...]] = (
        "num_embeddings", "embedding_dim", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq",
    )  # fmt: skip
    """What both have, as arguments and as attributes."""

    has_bags: bool
    """Whether a lookup gives a row for each bag of ids, instead of one for each id."""

    weight: nn.Parameter
    """The rows that this rank has, as a plain local Parameter with sparse gradients."""

    announced: tuple[Arguments, Tensor] | None = None
    """Arguments of a lookup that a collection has made ahead, and its result."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = True,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
        group: ProcessGroup | None = None,
        gradient: Literal["mean", "sum"] = "mean",
        placement: str = DIVIDED,
        _weight: Tensor | None = None,
    ) -> None:
        super().__init__()
        if scale_grad_by_freq:
            raise ValueError(
                "scale_grad_by_freq=True is not supported: torch does not support it for sparse gradients either. "
                "Use scale_grad_by_freq=False"
            )
        if not sparse:
            raise ValueError(
                "sparse=False is not supported: the gradients of a sharded table are always sparse. Use sparse=True"
            )
        if gradient not in ("mean", "sum"):
            raise ValueError(f"Invalid gradient value: {gradient!r}; expected 'mean' or 'sum'")
        if placement not in (DIVIDED, EVERYWHERE):
            raise ValueError(f"Invalid placement: {placement!r}; expected {DIVIDED!r} or {EVERYWHERE!r}")
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ValueError(
                f"padding_idx is {padding_idx}; expected -{num_embeddings} <= padding_idx < {num_embeddings}"
            )
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        self.max_norm, self.norm_type, self.scale_grad_by_freq = max_norm, norm_type, False
        self.gradient, self.placement, self._name = gradient, placement, ""
        group = _exchange.default_group(group)
        self.rank, self.ranks = _exchange.ranks_of(group)
        order = RowOrder.by_id(num_embeddings) if self.is_everywhere else RowOrder.spread(num_embeddings)
        peers = None if group is None else _exchange.GroupPeers(group)
        self._shard = TablePart(order, self.blocks[self.rank], peers, self.is_everywhere, new_identity(group))
        padding = -1 if padding_idx is None else int(order.positions(torch.tensor(self.padding_idx, device="cpu")))
        mine = self._shard.positions
        self._local_padding = padding - mine.start if padding in mine else None
        self._joint_lookup = JointLookup([self])
        self.weight = nn.Parameter(torch.empty(len(mine), embedding_dim, device=device, dtype=dtype))
        # The constants of the order count; this is their place in state dicts.
        self.register_buffer(ROW_ORDER, self._shard.order_as_tensor, persistent=not self._shard.order.is_by_id)
        if _weight is None:
            self.reset_parameters()
            return
        if _weight.shape != (num_embeddings, embedding_dim):
            raise ValueError(
                f"the full table has shape {tuple(_weight.shape)}; expected {(num_embeddings, embedding_dim)}"
            )
        with torch.no_grad():
            self.weight.copy_(self._shard.as_local(_weight))

    @classmethod
    def from_embedding(
        cls: type[_Table],
        embedding: _Plain,
        *,
        group: ProcessGroup | None = None,
        gradient: Literal["mean", "sum"] = "mean",
        placement: str = DIVIDED,
    ) -> _Table:
        """Shard a plain module of torch. Every rank passes the same full table and keeps its own rows.

        A module on the meta device gives its sizes and options only: new rows are drawn, on the default device.

        Args:
            embedding: an nn.Embedding, or an nn.EmbeddingBag for a ShardedEmbeddingBag.
            group: the process group; by default all ranks.
            gradient: how to combine the ranks' gradients of a row: ``"mean"`` or ``"sum"``.
            placement: ``"divided"`` or ``"everywhere"``.

        Examples:
            >>> import torch
            >>> from rowstep.distributed import ShardedEmbedding
            >>> plain = torch.nn.Embedding(10, 2)
            >>> table = ShardedEmbedding.from_embedding(plain)
            >>> torch.equal(table.full_weight(), plain.weight)
            True
        """
        weight, settings = embedding.weight, {name: getattr(embedding, name) for name in cls.settings}
        rows: dict[str, Any] = {} if weight.is_meta else {"_weight": weight, "device": weight.device}
        table = cls(**settings, **rows, dtype=weight.dtype, group=group, gradient=gradient, placement=placement)
        table.weight.requires_grad_(weight.requires_grad)
        return table

    def to_embedding(self) -> _Plain:
        """The whole table as a plain module of torch, on every rank. All ranks of the group must call this together."""
        settings = {name: getattr(self, name) for name in self.settings}
        has_sparse_gradients = settings.get("mode") != "max"  # torch has none there
        plain = self.plain(**settings, sparse=has_sparse_gradients, _weight=self.full_weight())
        plain.weight.requires_grad_(self.weight.requires_grad)
        return plain

    @property
    def group(self) -> ProcessGroup | None:
        """The ranks that share the table; None in a single process without torch.distributed."""
        peers = self._shard.peers  # and nowhere else: a copy of the module must not try to copy the group
        return None if peers is None else peers.group

    @property
    def identity(self) -> Identity:
        """Table id, identical on all ranks."""
        return self._shard.identity

    @property
    def is_everywhere(self) -> bool:
        """Whether every rank has all rows, and steps them alike."""
        return self.placement == EVERYWHERE

    @property
    def blocks(self) -> list[range]:
        """The positions that each rank holds."""
        if self.is_everywhere:
            return [range(self.num_embeddings)] * self.ranks
        return blocks(self.num_embeddings, self.ranks)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight" and is_dtensor(value):
            raise TypeError(
                f"the weight of {self.label} is to become a DTensor, as by fully_shard; expected a plain Parameter, "
                "because the table is sharded already: leave it out, by fully_shard(..., ignored_params={table.weight})"
            )
        super().__setattr__(name, value)
        if name == "weight":
            mark(self.weight, self._shard)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        mark(self.weight, self._shard)  # to_empty, and some conversions, make another Parameter
        return self

    # Contents

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw new rows from a normal distribution. The padding row is 0.

        Ranks that share a seed get the same table as a single process with that seed.
        """
        seed = int(torch.randint(2**62, (), device="cpu"))
        if self.weight.is_meta:
            return
        order, held = RowOrder.spread(self.num_embeddings), self._shard.positions
        for chunk in range(held.start // _ROWS_PER_SEED, -(-held.stop // _ROWS_PER_SEED)):
            generator = torch.Generator("cpu").manual_seed((seed + 0x9E3779B97F4A7C15 * chunk) % 2**63)
            shape = (_ROWS_PER_SEED, self.embedding_dim)
            rows = torch.randn(shape, generator=generator, dtype=self.weight.dtype, device="cpu")
            first = chunk * _ROWS_PER_SEED
            drawn = torch.arange(first, min(first + _ROWS_PER_SEED, self.num_embeddings), device="cpu")
            here = self.positions(order.ids(drawn)) - held.start  # the same rows for an id, whatever the placement
            mine = (here >= 0) & (here < len(held))
            self.weight[here[mine]] = rows[: len(drawn)][mine].to(self.weight.device)
        if self._local_padding is not None:
            self.weight[self._local_padding] = 0

    @torch.no_grad()
    def full_weight(self) -> Tensor:
        """The whole table, by id, on every rank. All ranks of the group must call this together."""
        operation = Operation(f"gathering of {self.label}")
        local = _exchange.agree(operation, self.weight.detach, self.group)  # it may have to catch up, and fail
        if self.is_everywhere:
            return local.clone()
        full = torch.empty(self.num_embeddings, self.embedding_dim, dtype=local.dtype, device=local.device)
        contents = _exchange.each_block(local, [len(positions) for positions in self.blocks], operation, self.group)
        for positions, block in zip(self.blocks, contents, strict=True):
            ids = self._shard.order.ids(torch.arange(positions.start, positions.stop, device=full.device))
            full[ids] = block
        return full

    def local_rows(self, ids: Tensor) -> Tensor:
        """The rows of this rank's ``weight`` that hold those of ``ids`` that it owns, to inspect or reset them.

        Args:
            ids: row numbers of the whole table.

        Examples:
            >>> import torch
            >>> from rowstep import SparseAdam
            >>> from rowstep.distributed import ShardedEmbedding
            >>> table = ShardedEmbedding(10, 2)
            >>> optimizer = SparseAdam(table.parameters())
            >>> optimizer.reset_rows(table.weight, table.local_rows(torch.tensor([4, 7])))
        """
        ShardedTable.check(self, ids)  # of bags, too: ids are enough here
        positions, mine = self.positions(ids), self._shard.positions
        return positions[(positions >= mine.start) & (positions < mine.stop)] - mine.start

    # Lookups

    @property
    def label(self) -> str:
        """What to call the table in a message."""
        if self._name:
            return f"table {self._name!r}"
        number, *copies = self.identity
        return f"table {number}" + "".join(f", copy {copy}" for copy in copies)

    def set_label(self, name: str) -> None:
        """Take the name that a collection, or a model, has for the table, unless it has one."""
        self._name = self._name or name

    @property
    def described(self) -> str:
        """What ranks must have in common of it."""
        size = f"{self.num_embeddings} x {self.embedding_dim}"
        return f"{self.label}: {size}, {self.weight.dtype}, {self.placement}, {self._options_in_words()}"

    def checksum_in_words(self) -> str:
        """A checksum of the rows, where every rank must have the same ones."""
        if not self.is_everywhere or self.ranks == 1:
            return ""
        rows = self.weight.detach().reshape(-1).view(torch.uint8).cpu().numpy()
        return f", rows with checksum {zlib.crc32(rows.tobytes()):08x}"

    def _look_up(self, *arguments: Any) -> Tensor:
        if self.announced is not None:
            return self._announced_result(arguments, *self.announced)
        (result,) = self._joint_lookup.look_up(lambda: [arguments])
        assert result is not None, "there was a lookup"
        return result

    def _announced_result(self, arguments: Arguments, expected: Arguments, result: Tensor) -> Tensor:
        """What a collection has looked up ahead of this call, unless it was for other arguments."""
        if not expected or not all(
            mine is other or (isinstance(mine, Tensor) and isinstance(other, Tensor) and torch.equal(mine, other))
            for mine, other in itertools.zip_longest(arguments, expected)
        ):
            raise ValueError(
                f"{self.label} was called with other ids than were announced for it; expected the same, once. Announce "
                "all lookups of the block, or make this one outside of it"
            )
        self.announced = (), result
        return result

    def read(self, rows: Tensor) -> Tensor:
        """These rows of this rank's block; rows that wait catch up."""
        return F.embedding(rows, self.weight, self._local_padding, self.max_norm, self.norm_type)

    def gradient_of(self, rows: Tensor, grads: Tensor) -> Tensor:
        """The sparse gradient of the block, from what ranks have summed for these rows of it."""
        if self._local_padding is not None:
            kept = rows != self._local_padding
            rows, grads = rows[kept], grads[kept]
        if not len(rows):  # tables share the storage of empty parts, and torch fills an empty gradient in place
            rows, grads = rows.clone(), grads.clone()
        return torch.sparse_coo_tensor(
            rows.unsqueeze(0), grads, self.weight.shape, device=grads.device, check_invariants=False
        )

    def positions(self, ids: Tensor) -> Tensor:
        """Where ids of any shape are in the order of the table's rows."""
        return self._shard.order.positions(ids.reshape(-1))

    def check(self, ids: Tensor) -> Tensor:
        """The ids of a lookup, of any shape. Raises if they, or other arguments, cannot be taken."""
        if not isinstance(ids, Tensor) or ids.dtype not in (torch.int32, torch.int64):
            kind = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
            raise TypeError(f"the ids are {kind}; expected a tensor of torch.int32 or torch.int64")
        if ids.device != self.weight.device:
            raise ValueError(f"the ids are on {ids.device}; expected {self.weight.device}, the table's device")
        if ids.numel():
            lowest, highest = (int(bound) for bound in torch.aminmax(ids))
            if lowest < 0 or highest >= self.num_embeddings:
                outside = lowest if lowest < 0 else highest
                raise outside_error(outside, self.num_embeddings)
        return ids

    def finish(self, rows: Tensor, places: Tensor, ids: Tensor) -> Tensor:
        """What a lookup gives: from a row for each id or, for bags, from distinct rows and the place of each id."""
        return rows if ids.dim() == 1 else rows.view(*ids.shape, self.embedding_dim)

    # State dicts and copies

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = self._shard.as_global(destination[prefix + "weight"])
        if prefix + ROW_ORDER in destination:
            destination[prefix + ROW_ORDER] = self._shard.order_as_tensor

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        given = dict(state_dict)
        constants, loaded = given.pop(prefix + ROW_ORDER, None), given.get(prefix + "weight")
        if loaded is not None:
            given[prefix + "weight"] = self._shard.as_local(loaded, constants)
        if not self._shard.order.is_by_id and (loaded is not None or constants is not None):
            given[prefix + ROW_ORDER] = self._shard.order_as_tensor
        super()._load_from_state_dict(given, prefix, *args)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._shard = dataclasses.replace(self._shard, identity=new_identity(self.group, self.identity))
        mark(self.weight, self._shard)  # a copied Parameter has lost it
        self._joint_lookup = JointLookup([self])

    def extra_repr(self) -> str:
        size, owned = f"{self.num_embeddings}, {self.embedding_dim}", len(self._shard.positions)
        return f"{size}, {self._options_in_words()}, rank {self.rank} of {self.ranks} owns {owned} rows"

    def _options_in_words(self) -> str:
        options = {name: getattr(self, name) for name in self.settings[2:]} | {"gradient": self.gradient}
        if self.max_norm is None:
            del options["norm_type"]
        given = {name: value for name, value in options.items() if value is not None and value is not False}
        return ", ".join(f"{name}={value!r}" for name, value in given.items())

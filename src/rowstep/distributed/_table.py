"""What both sharded tables share: a module that holds one block of a table's rows, and how that is filled and saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F  # noqa: N812  # as torch's own documents have it
from torch.nn.parallel import DistributedDataParallel

from .._layout import RowOrder
from .._part import ROW_ORDER, TablePart, mark
from .._torch_internals import parameters_of_ddp, running_ddp
from . import _exchange
from ._dedupe import Deduped, dedupe
from ._fetch import Request, fetch_rows
from ._plan import Blocks

# Fresh rows are drawn in chunks of positions, each from a seed of its own, so that they do not depend on the ranks.
_ROWS_PER_SEED = 4096


class ShardedTable(nn.Module):
    """A table whose rows are sharded over the ranks of a process group."""

    weight: nn.Parameter
    """The rows that this rank owns, as a plain local Parameter with sparse gradients."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        padding_idx: int | None,
        max_norm: float | None,
        norm_type: float,
        scale_grad_by_freq: bool,
        sparse: bool,
        full_weight: Tensor | None,
        freeze: bool,
        device: Any,
        dtype: torch.dtype | None,
        group: ProcessGroup | None,
        gradient: str,
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
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = _row_number(padding_idx, num_embeddings)
        self.max_norm, self.norm_type, self.gradient = max_norm, norm_type, gradient
        group = _exchange.default_group(group)
        self.rank, self.ranks = _exchange.ranks_of(group)
        self._number = _exchange.number_of_table(group)
        self._blocks = Blocks(num_embeddings, self.ranks)
        peers = None if group is None else _exchange.GroupPeers(group)
        self._shard = TablePart(RowOrder.spread(num_embeddings), self._blocks.of(self.rank), peers)
        rows = torch.empty(len(self._shard.positions), embedding_dim, device=device, dtype=dtype)
        self.weight = nn.Parameter(rows, requires_grad=not freeze)
        # The constants of the order count; this is their place in state dicts.
        self.register_buffer(ROW_ORDER, self._shard.order_as_tensor)
        if full_weight is None:
            self.reset_parameters()
        else:
            self._take_rows_of(full_weight)

    @property
    def group(self) -> ProcessGroup | None:
        """The ranks that share the table; None in a single process without torch.distributed."""
        peers = self._shard.peers  # and nowhere else: a copy of the module must not try to copy the group
        return None if peers is None else peers.group

    def __setattr__(self, name: str, value: Any) -> None:
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
        positions = self._shard.positions
        for chunk in range(positions.start // _ROWS_PER_SEED, -(-positions.stop // _ROWS_PER_SEED)):
            generator = torch.Generator("cpu").manual_seed((seed + 0x9E3779B97F4A7C15 * chunk) % 2**63)
            shape = (_ROWS_PER_SEED, self.embedding_dim)
            rows = torch.randn(shape, generator=generator, dtype=self.weight.dtype, device="cpu")
            first = chunk * _ROWS_PER_SEED
            start, stop = max(first, positions.start), min(first + _ROWS_PER_SEED, positions.stop)
            self.weight[start - positions.start : stop - positions.start] = rows[start - first : stop - first]
        if (padding := self._local_padding) is not None:
            self.weight[padding] = 0

    @torch.no_grad()
    def _take_rows_of(self, full_weight: Tensor) -> None:
        expected = (self.num_embeddings, self.embedding_dim)
        if tuple(full_weight.shape) != expected:
            raise ValueError(f"the full table has shape {tuple(full_weight.shape)}; expected {expected}")
        self.weight.copy_(self._shard.as_local(full_weight, RowOrder.by_id(self.num_embeddings)))

    @torch.no_grad()
    def full_weight(self) -> Tensor:
        """The whole table, by id, on every rank. All ranks of the group must call this together."""
        local = _exchange.agree(self.weight.detach, self.group)  # it may have to catch up, and fail
        full = self.weight.new_empty(self.num_embeddings, self.embedding_dim)
        lengths = [len(self._blocks.of(rank)) for rank in range(self.ranks)]
        first = 0
        for block in _exchange.each_block(local, lengths, self.group):
            positions = torch.arange(first, first + len(block), device=full.device)
            full[self._shard.order.ids(positions)] = block
            first += len(block)
        return full

    def local_rows(self, ids: Tensor) -> Tensor:
        """The rows of this rank's ``weight`` that hold those of ``ids`` that it owns, to inspect or reset them."""
        self._check(ids)
        mine = self._shard.positions
        positions = self._shard.order.positions(ids.reshape(-1))
        return positions[(positions >= mine.start) & (positions < mine.stop)] - mine.start

    # Lookups

    def _read(self, rows: Tensor) -> Tensor:
        return F.embedding(rows, self.weight, self._local_padding, self.max_norm, self.norm_type, False, True)

    def _fetch(self, check: Callable[[], None], ids: Tensor) -> tuple[Tensor, Deduped]:
        """The distinct rows that ``ids`` name, from all ranks, and which of them each id has."""
        if self.group is None:
            check()
            wanted = self._wanted_positions(ids)
            return self._read(wanted.numbers.to(torch.int64)), wanted
        return fetch_rows(
            lambda: self._ask(check, ids),
            self._read,
            self.group,
            table=self._number,
            has_backward=torch.is_grad_enabled() and self.weight.requires_grad,
            divisor=self.ranks if self.gradient == "mean" else 1,
        )

    def _ask(self, check: Callable[[], None], ids: Tensor) -> Request:
        self._refuse_torchs_ddp()
        check()
        wanted = self._wanted_positions(ids)
        # Sorted by position is sorted by owner: the blocks follow each other.
        in_block = (wanted.numbers % self._blocks.size).to(self._index_dtype)
        return Request(wanted, in_block, self._blocks.cut(wanted.numbers))

    def _refuse_torchs_ddp(self) -> None:
        active = running_ddp()
        if isinstance(active, DistributedDataParallel) and any(
            param is self.weight for param in parameters_of_ddp(active)
        ):
            raise RuntimeError(
                "a model with a sharded table was wrapped in torch's DistributedDataParallel, which has overwritten "
                "every rank's rows with those of rank 0. Recreate the model and use rowstep.distributed.ddp instead"
            )

    def _wanted_positions(self, ids: Tensor) -> Deduped:
        positions = self._shard.order.positions(ids)
        return dedupe(positions.to(torch.int32) if self.num_embeddings < 2**31 else positions)  # sorts 1.4x faster

    @property
    def _index_dtype(self) -> torch.dtype:
        """What row numbers travel as: half the bytes wherever a block has fewer than 2^31 rows."""
        return torch.int32 if self._blocks.size < 2**31 else torch.int64

    def _check(self, ids: Tensor) -> None:
        if not isinstance(ids, Tensor) or ids.dtype not in (torch.int32, torch.int64):
            kind = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
            raise TypeError(f"the ids are {kind}; expected a tensor of torch.int32 or torch.int64")
        if ids.device != self.weight.device:
            raise ValueError(f"the ids are on {ids.device}; expected {self.weight.device}, the table's device")
        if ids.numel():
            lowest, highest = (int(bound) for bound in torch.aminmax(ids))
            if lowest < 0 or highest >= self.num_embeddings:
                outside = lowest if lowest < 0 else highest
                raise IndexError(f"id {outside} is outside the table; expected 0 <= id < {self.num_embeddings}")

    @property
    def _local_padding(self) -> int | None:
        """The row of this rank's block that is the padding row, if it owns that."""
        if self.padding_idx is None:
            return None
        position = int(self._shard.order.positions(torch.tensor(self.padding_idx, device="cpu")))
        positions = self._shard.positions
        return position - positions.start if position in positions else None

    # State dicts and copies

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = self._shard.as_global(destination[prefix + "weight"])
        destination[prefix + ROW_ORDER] = self._shard.order_as_tensor

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        given = dict(state_dict)
        constants, loaded = given.get(prefix + ROW_ORDER), given.get(prefix + "weight")
        if loaded is not None:
            given[prefix + "weight"] = self._shard.as_local(loaded, self._shard.order_of(constants, loaded))
            given[prefix + ROW_ORDER] = self._shard.order_as_tensor
        super()._load_from_state_dict(given, prefix, *args)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        mark(self.weight, self._shard)  # a copied Parameter has lost it

    def extra_repr(self) -> str:
        text = f"{self.num_embeddings}, {self.embedding_dim}"
        if self.padding_idx is not None:
            text += f", padding_idx={self.padding_idx}"
        if self.max_norm is not None:
            text += f", max_norm={self.max_norm}, norm_type={self.norm_type}"
        owned = self._shard.positions
        return f"{text}, gradient={self.gradient!r}, rank {self.rank} of {self.ranks} owns {len(owned)} rows"


def _row_number(index: int | None, rows: int) -> int | None:
    if index is None:
        return None
    if not -rows <= index < rows:
        raise ValueError(f"padding_idx is {index}; expected -{rows} <= padding_idx < {rows}")
    return index % rows

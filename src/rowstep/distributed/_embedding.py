"""ShardedEmbedding and ShardedEmbeddingBag: torch's modules, for tables that are divided among ranks.

Once the rows are here, what is made of them is torch's own business, and so is the gradient of that: it arrives summed
over the places of each row, and goes back to the row's owner, where it becomes a sparse gradient of the local block.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F  # noqa: N812  # as torch's own documents have it

from ._dedupe import Deduped
from ._fetch import Lookup
from ._placement import DIVIDED
from ._table import ShardedTable


class ShardedEmbedding(ShardedTable):
    """torch.nn.Embedding, with its rows sharded over the ranks of a process group.

    Every rank looks up its own ids. All ranks of the group must make the lookup together, though any may have no ids.
    Owners send the rows, and the backward pass returns the gradients to them, so an optimizer steps only local rows and
    sends nothing. A row's owner is

        position = multiplier · id mod rows
        owner    = position // rows per rank

    so that ids sorted by popularity spread evenly. See ``docs/distributed.md``.

    Args:
        num_embeddings: rows of the whole table.
        embedding_dim: its width.
        padding_idx: as for torch.nn.Embedding.
        max_norm: as for torch.nn.Embedding.
        norm_type: as for torch.nn.Embedding.
        scale_grad_by_freq: refused unless False, as torch does for sparse gradients.
        sparse: refused unless True.
        device: where this rank's rows are.
        dtype: of the rows.
        group: the process group; by default all ranks. In a process without torch.distributed the table is not sharded.
        gradient: how to combine the ranks' gradients of a row: ``"mean"``, as under DistributedDataParallel, or
            ``"sum"``.
        placement: ``"divided"`` by rows over all ranks, or ``"everywhere"``: whole on every rank.

    Examples:
        >>> import torch
        >>> from rowstep import SparseAdam
        >>> from rowstep.distributed import ShardedEmbedding
        >>> table = ShardedEmbedding(1000, 8)  # in a single process: one block
        >>> optimizer = SparseAdam(table.parameters())
        >>> table(torch.tensor([[3, 5], [5, 9]])).sum().backward()
        >>> optimizer.step()
        >>> table.weight.grad.is_sparse, table.to_embedding()
        (True, Embedding(1000, 8, sparse=True))
    """

    has_bags = False

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = True,
        _weight: Tensor | None = None,
        _freeze: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        group: ProcessGroup | None = None,
        gradient: str = "mean",
        placement: str = DIVIDED,
    ) -> None:
        super().__init__(
            num_embeddings,
            embedding_dim,
            padding_idx=padding_idx,
            max_norm=max_norm,
            norm_type=norm_type,
            scale_grad_by_freq=scale_grad_by_freq,
            sparse=sparse,
            full_weight=_weight,
            freeze=_freeze,
            device=device,
            dtype=dtype,
            group=group,
            gradient=gradient,
            placement=placement,
        )

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # who sends how much depends on the ids
    def forward(self, input: Tensor) -> Tensor:
        """Look up ids. All ranks of the group call this together.

        Args:
            input: ids of any shape.
        """
        return self._look_up(input)

    def lookup(self, input: Tensor) -> Lookup:
        """What ``forward`` does with these arguments, in parts: before and after rows are fetched."""
        return Lookup(lambda: self._check(input))

    @classmethod
    def from_embedding(
        cls,
        embedding: nn.Embedding,
        *,
        group: ProcessGroup | None = None,
        gradient: str = "mean",
        placement: str = DIVIDED,
        device: Any = None,
    ) -> ShardedEmbedding:
        """Shard an Embedding. Every rank passes the same full table and keeps its own rows.

        Of one on the meta device only sizes and options count: new rows are drawn, on ``device``.

        Args:
            embedding: a plain nn.Embedding.
            group: the process group; by default all ranks.
            gradient: how to combine the ranks' gradients of a row: ``"mean"`` or ``"sum"``.
            placement: ``"divided"`` or ``"everywhere"``.
            device: of a table on the meta device.

        Examples:
            >>> import torch
            >>> from rowstep.distributed import ShardedEmbedding
            >>> plain = torch.nn.Embedding(10, 2)
            >>> table = ShardedEmbedding.from_embedding(plain)
            >>> torch.equal(table.full_weight(), plain.weight)
            True
        """
        weight, device = embedding.weight, _device_of(embedding, device)
        return cls(
            embedding.num_embeddings,
            embedding.embedding_dim,
            embedding.padding_idx,
            embedding.max_norm,
            embedding.norm_type,
            embedding.scale_grad_by_freq,
            _weight=None if weight.is_meta else weight,
            _freeze=not weight.requires_grad,
            device=device,
            dtype=weight.dtype,
            group=group,
            gradient=gradient,
            placement=placement,
        )

    def to_embedding(self) -> nn.Embedding:
        """The whole table as an Embedding, on every rank. All ranks of the group must call this together."""
        return nn.Embedding(
            self.num_embeddings,
            self.embedding_dim,
            self.padding_idx,
            self.max_norm,
            self.norm_type,
            sparse=True,
            _weight=self.full_weight(),
            _freeze=not self.weight.requires_grad,
        )


class ShardedEmbeddingBag(ShardedTable):
    """torch.nn.EmbeddingBag, with its rows sharded over the ranks of a process group.

    Lookups work as in ``ShardedEmbedding``. ``mode="max"`` works too, though torch does not support it for sparse
    gradients.

    Args:
        num_embeddings: rows of the whole table.
        embedding_dim: its width.
        max_norm: as for torch.nn.EmbeddingBag.
        norm_type: as for torch.nn.EmbeddingBag.
        scale_grad_by_freq: refused unless False.
        mode: ``"sum"``, ``"mean"`` or ``"max"``.
        sparse: refused unless True.
        include_last_offset: as for torch.nn.EmbeddingBag.
        padding_idx: as for torch.nn.EmbeddingBag.
        device: where this rank's rows are.
        dtype: of the rows.
        group: the process group; by default all ranks. In a process without torch.distributed the table is not sharded.
        gradient: how to combine the ranks' gradients of a row: ``"mean"``, as under DistributedDataParallel, or
            ``"sum"``.
        placement: ``"divided"`` by rows over all ranks, or ``"everywhere"``: whole on every rank.

    Examples:
        >>> import torch
        >>> from rowstep.distributed import ShardedEmbeddingBag
        >>> bags = ShardedEmbeddingBag(1000, 8, mode="sum")
        >>> bags(torch.tensor([3, 5, 5]), offsets=torch.tensor([0, 2])).shape  # two bags: 3 and 5; 5
        torch.Size([2, 8])
    """

    has_bags = True

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: bool = True,
        _weight: Tensor | None = None,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        group: ProcessGroup | None = None,
        gradient: str = "mean",
        placement: str = DIVIDED,
    ) -> None:
        if mode not in ("sum", "mean", "max"):
            raise ValueError(f"Invalid mode value: {mode!r}; expected 'sum', 'mean' or 'max'")
        super().__init__(
            num_embeddings,
            embedding_dim,
            padding_idx=padding_idx,
            max_norm=max_norm,
            norm_type=norm_type,
            scale_grad_by_freq=scale_grad_by_freq,
            sparse=sparse,
            full_weight=_weight,
            freeze=False,
            device=device,
            dtype=dtype,
            group=group,
            gradient=gradient,
            placement=placement,
        )
        self.mode, self.include_last_offset = mode, include_last_offset

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # who sends how much depends on the ids
    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Look up bags of ids. All ranks of the group call this together.

        Args:
            input: ids; each row of a 2-D tensor is a bag.
            offsets: where the bags of a 1-D ``input`` start.
            per_sample_weights: a factor for each id, with ``mode="sum"``.
        """
        return self._look_up(input, offsets, per_sample_weights)

    def lookup(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Lookup:
        """What ``forward`` does with these arguments, in parts: before and after rows are fetched."""

        def check() -> Tensor:
            # Bags of a table of one row and one number: what torch has to say about the arguments, it says before
            # anything is sent (0.1 ms for 65,536 ids).
            self._check(input)
            one = torch.zeros(1, 1, dtype=self.weight.dtype, device=self.weight.device)
            with torch.no_grad():
                self._reduce(torch.zeros_like(input), one, offsets, per_sample_weights, None)
            return input

        def reduce(rows: Tensor, found: Deduped) -> Tensor:
            places = found.places
            padding = None
            if self.padding_idx is not None:
                padded = places[input == self.padding_idx]
                padding = int(padded[0]) if len(padded) else None
            if not len(rows):  # torch wants a row, even for no ids
                rows = torch.cat([rows, rows.new_zeros(1, self.embedding_dim)])
            return self._reduce(places.to(input.dtype), rows, offsets, per_sample_weights, padding)

        return Lookup(check, reduce)

    def _reduce(
        self, places: Tensor, rows: Tensor, offsets: Tensor | None, weights: Tensor | None, padding: int | None
    ) -> Tensor:
        return F.embedding_bag(
            places,
            rows,
            offsets,
            mode=self.mode,
            per_sample_weights=weights,
            include_last_offset=self.include_last_offset,
            padding_idx=padding,
        )

    @classmethod
    def from_embedding(
        cls,
        embedding: nn.EmbeddingBag,
        *,
        group: ProcessGroup | None = None,
        gradient: str = "mean",
        placement: str = DIVIDED,
        device: Any = None,
    ) -> ShardedEmbeddingBag:
        """Shard an EmbeddingBag, as ``ShardedEmbedding.from_embedding`` does an Embedding.

        Args:
            embedding: a plain nn.EmbeddingBag.
            group: the process group; by default all ranks.
            gradient: how to combine the ranks' gradients of a row: ``"mean"`` or ``"sum"``.
            placement: ``"divided"`` or ``"everywhere"``.
            device: of a table on the meta device.
        """
        weight, device = embedding.weight, _device_of(embedding, device)
        table = cls(
            embedding.num_embeddings,
            embedding.embedding_dim,
            embedding.max_norm,
            embedding.norm_type,
            embedding.scale_grad_by_freq,
            embedding.mode,
            _weight=None if weight.is_meta else weight,
            include_last_offset=embedding.include_last_offset,
            padding_idx=embedding.padding_idx,
            device=device,
            dtype=weight.dtype,
            group=group,
            gradient=gradient,
            placement=placement,
        )
        table.weight.requires_grad_(weight.requires_grad)
        return table

    def to_embedding(self) -> nn.EmbeddingBag:
        """The whole table as an EmbeddingBag, on every rank. All ranks of the group must call this together."""
        bag = nn.EmbeddingBag(
            self.num_embeddings,
            self.embedding_dim,
            self.max_norm,
            self.norm_type,
            mode=self.mode,
            sparse=self.mode != "max",
            _weight=self.full_weight(),
            include_last_offset=self.include_last_offset,
            padding_idx=self.padding_idx,
        )
        bag.weight.requires_grad_(self.weight.requires_grad)
        return bag

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, mode={self.mode!r}"


def _device_of(embedding: nn.Embedding | nn.EmbeddingBag, device: Any) -> Any:
    if device is not None:
        return device
    return None if embedding.weight.is_meta else embedding.weight.device

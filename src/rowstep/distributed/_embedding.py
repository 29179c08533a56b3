"""ShardedEmbedding and ShardedEmbeddingBag: torch's modules, for tables that are divided among ranks.

Once the rows are here, what is made of them is torch's own business, and so is the gradient of that: it arrives summed
over the places of each row, and goes back to the row's owner, where it becomes a sparse gradient of the local block.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # as torch's own documents have it

from ._table import ShardedTable


class ShardedEmbedding(ShardedTable[nn.Embedding]):
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

    plain, has_bags = nn.Embedding, False

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # who sends how much depends on the ids
    def forward(self, input: Tensor) -> Tensor:
        """Look up ids. All ranks of the group call this together.

        Args:
            input: ids of any shape.
        """
        return self._look_up(input)


class ShardedEmbeddingBag(ShardedTable[nn.EmbeddingBag]):
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
        **options: ``device``, ``dtype``, ``group``, ``gradient`` and ``placement``, as for ``ShardedEmbedding``.

    Examples:
        >>> import torch
        >>> from rowstep.distributed import ShardedEmbeddingBag
        >>> bags = ShardedEmbeddingBag(1000, 8, mode="sum")
        >>> bags(torch.tensor([3, 5, 5]), offsets=torch.tensor([0, 2])).shape  # two bags: 3 and 5; 5
        torch.Size([2, 8])
    """

    plain, has_bags = nn.EmbeddingBag, True
    settings = (*ShardedTable.settings, "mode", "include_last_offset")

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: Literal["sum", "mean", "max"] = "mean",
        sparse: bool = True,
        *,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        **options: Any,
    ) -> None:
        if mode not in ("sum", "mean", "max"):
            raise ValueError(f"Invalid mode value: {mode!r}; expected 'sum', 'mean' or 'max'")
        super().__init__(
            num_embeddings, embedding_dim, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse, **options
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

    def check(self, ids: Tensor, offsets: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        # Bags of a table of one row and one number: what torch has to say about the arguments, it says before anything
        # is sent (0.1 ms for 65,536 ids).
        super().check(ids)
        one = torch.zeros(1, 1, dtype=self.weight.dtype, device=self.weight.device)
        with torch.no_grad():
            self._reduce(torch.zeros_like(ids), one, offsets, weights, None)
        return ids

    def finish(
        self, rows: Tensor, places: Tensor, ids: Tensor, offsets: Tensor | None = None, weights: Tensor | None = None
    ) -> Tensor:
        places = places.view(ids.shape)
        padding = None
        if self.padding_idx is not None:
            padded = places[ids == self.padding_idx]
            padding = int(padded[0]) if len(padded) else None
        if not len(rows):  # torch wants a row, even for no ids
            rows = torch.cat([rows, rows.new_zeros(1, self.embedding_dim)])
        return self._reduce(places.to(ids.dtype), rows, offsets, weights, padding)

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

"""HostEmbedding: a table in the memory of the host, or in a file, for a model that computes elsewhere.

A table of 10^8 rows fits on no GPU, and a batch needs few of them. So a lookup makes one journey each way:

    ids       distinct ones, sorted, to the CPU
    rows      each once, gathered there and copied to the device
    lookup    torch's own, on the device, over the rows that have arrived
    gradient  summed on the device for each distinct row, and copied back: a sparse gradient that names each row once

The weight is a plain CPU parameter, so optimizers, clipping, surgery and checkpoints need to know nothing of this. It
is read by ``F.embedding``, which is how a deferred optimizer sees which rows have to catch up.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # as torch's own documents have it

from . import _ahead
from ._ids import outside_error
from ._memory import is_in_file
from ._torch_internals import never_compiled, without_torch_function

_CPU = torch.device("cpu")
_Path = str | os.PathLike[str]
_Batch = TypeVar("_Batch")


class HostEmbedding(nn.Embedding):
    """torch.nn.Embedding or EmbeddingBag with its table on the CPU, for a model on another device.

    Only the distinct rows of a batch travel. The gradient of ``weight`` is sparse, names each row once, and is on the
    CPU. ``.to(device)`` leaves the table where it is, and sets where rows arrive; so does assigning to ``device``. The
    copies to and from a GPU were never run on one. See ``docs/host.md``.

    Args:
        rows: of the table.
        dim: columns of the table.
        dtype: of the table; by default torch's default.
        device: where rows arrive; by default torch's default device.
        path: of a safetensors file for the table, which is made if it does not exist. None: the table is in RAM.
        key: the table's name in the file.
        mode: ``"sum"``, ``"mean"`` or ``"max"`` for bags, as for torch.nn.EmbeddingBag. None: a row for each id.
        padding_idx: as for torch.nn.Embedding.
        max_norm: as for torch.nn.Embedding.
        norm_type: as for torch.nn.Embedding.
        scale_grad_by_freq: as for torch.nn.Embedding, which supports it only for dense gradients.
        include_last_offset: as for torch.nn.EmbeddingBag.

    Examples:
        >>> import torch
        >>> from rowstep import HostEmbedding, SparseAdam
        >>> table = HostEmbedding(1000, 8, device="cpu")  # or "cuda"
        >>> table(torch.tensor([[3, 5], [5, 9]])).sum().backward()
        >>> table.weight.grad.coalesce().indices()
        tensor([[3, 5, 9]])
        >>> SparseAdam(table.parameters()).step()
    """

    def __init__(
        self,
        rows: int,
        dim: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | int | None = None,
        path: _Path | None = None,
        key: str = "weight",
        mode: Literal["sum", "mean", "max"] | None = None,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        include_last_offset: bool = False,
        _weight: Tensor | None = None,
        _freeze: bool = False,
    ) -> None:
        if mode not in (None, "sum", "mean", "max"):
            raise ValueError(f"mode is {mode!r}; expected 'sum', 'mean' or 'max', or None for no bags")
        if mode is None and include_last_offset:
            raise ValueError("include_last_offset is True and mode is None; expected a mode, as only bags have offsets")
        if padding_idx is not None and not -rows <= padding_idx < rows:
            raise ValueError(f"padding_idx is {padding_idx}; expected a row of the table, which has {rows}")
        if path is not None:
            _weight = _table_in_file(path, key, (rows, dim), dtype or torch.get_default_dtype(), padding_idx)
        super().__init__(
            rows, dim, padding_idx, max_norm, norm_type, scale_grad_by_freq,
            sparse=True, _weight=_weight, _freeze=_freeze, device=_CPU, dtype=dtype,
        )  # fmt: skip
        self.mode, self.include_last_offset = mode, include_last_offset
        self.device = torch.get_default_device() if device is None else torch.device(device)

    @classmethod
    def from_pretrained(cls, embeddings: Tensor, freeze: bool = True, **options: Any) -> HostEmbedding:  # type: ignore[override]
        """Make a table of a tensor, whose memory it shares if that is on the CPU.

        Args:
            embeddings: the rows.
            freeze: do not train them; True by default, as for torch.nn.Embedding.
            **options: as for ``HostEmbedding``, without ``dtype``, ``key`` and ``path``.
        """
        if embeddings.dim() != 2:
            raise ValueError(f"the embeddings have shape {tuple(embeddings.shape)}; expected two dimensions")
        if not options.keys().isdisjoint({"dtype", "key", "path"}):
            raise TypeError("from_pretrained has no dtype, key or path; expected the tensor as it is to be the table")
        return cls(*embeddings.shape, _weight=embeddings.to(_CPU), _freeze=freeze, **options)

    @never_compiled  # type: ignore[untyped-decorator]  # how many rows travel depends on the ids
    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Look up ids, or bags of them.

        Args:
            input: ids of any shape, on any device; where there are bags, each row of a 2-D tensor is one.
            offsets: where the bags of a 1-D ``input`` start.
            per_sample_weights: a factor for each id, with ``mode="sum"``; best on ``device``, or to copy them waits.
        """
        if self.mode is None and not (offsets is None and per_sample_weights is None):
            raise ValueError("offsets or per_sample_weights are for bags; expected neither, or a table with a mode")
        ahead = _ahead.of_table(self.weight)
        batch = ahead.take(_transfer(input, _CPU)) if ahead.announced else None
        if batch is None:
            distinct, places = torch.unique(input, return_inverse=True)
            rows = _transfer(distinct, _CPU)
        else:
            rows, places = batch.distinct, batch.places
        padding = self._padding_among(rows)
        if batch is None:
            without_torch_function(ahead.read_files, rows)
        with torch.no_grad():  # their gradient comes with _Arrived
            if batch is None or self.max_norm is not None:
                gathered = F.embedding(rows, self.weight, None, self.max_norm, self.norm_type)
            else:
                gathered = without_torch_function(ahead.rows_of, batch, self.weight)
        arrived, places = _transfer(gathered, self.device), _transfer(places, self.device)
        if self.mode is None:
            return _Arrived.apply(self.weight, arrived, rows, padding, places, self.scale_grad_by_freq)  # type: ignore[no-any-return,no-untyped-call]
        table = _Arrived.apply(self.weight, arrived, rows, padding)  # type: ignore[no-untyped-call]
        table = table.to(_wider(table.dtype))
        if offsets is not None:
            offsets = _transfer(offsets, self.device)
        if per_sample_weights is not None:
            per_sample_weights = per_sample_weights.to(self.device, table.dtype)
        return F.embedding_bag(
            places, table, offsets, mode=self.mode, padding_idx=padding, per_sample_weights=per_sample_weights,
            scale_grad_by_freq=self.scale_grad_by_freq, include_last_offset=self.include_last_offset,
        ).to(arrived.dtype)  # fmt: skip

    def prefetch(self, ids: Tensor) -> None:
        """Announce the ids of the next batch, before the ``optimizer.step()`` of this one.

        Then their rows are read, and the rows that they do not name are stepped, while the model computes. The result
        has the same bits. What is announced need not be looked up, nor announced what is. See ``docs/host.md``.

        Args:
            ids: those of a lookup to come, as ``forward`` will get them.

        Examples:
            >>> import torch
            >>> from rowstep import HostEmbedding, SparseAdam
            >>> table = HostEmbedding(1000, 8, device="cpu")
            >>> optimizer = SparseAdam(table.parameters())
            >>> batches = torch.randint(0, 1000, (10, 32))
            >>> for ids, following in zip(batches, batches[1:]):
            ...     table.prefetch(following)
            ...     optimizer.zero_grad()
            ...     table(ids).square().sum().backward()
            ...     optimizer.step()
        """
        if not isinstance(ids, Tensor) or ids.dtype not in (torch.int32, torch.int64):
            found = f"a tensor of {ids.dtype}" if isinstance(ids, Tensor) else f"a {type(ids).__name__}"
            raise TypeError(f"ids is {found}; expected a tensor of torch.int64 or torch.int32")
        copied = ids.detach().to(_CPU, copy=True)  # data loaders use their buffers again
        is_elsewhere, may_read = self.device.type != "cpu", self.max_norm is None
        without_torch_function(
            _ahead.of_table(self.weight).announce, self.weight, copied, pinned=is_elsewhere, may_read=may_read
        )

    def _padding_among(self, rows: Tensor) -> int | None:
        """Which of the ascending rows is the padding, if it is there. Raises if there are rows that the table lacks."""
        for outside in rows[[0, -1]].tolist() if len(rows) else ():
            if not 0 <= outside < len(self.weight):  # not num_embeddings: an optimizer may have added rows
                raise outside_error(outside, len(self.weight))
        if self.padding_idx is None:
            return None
        place = int(torch.searchsorted(rows, self.padding_idx))
        return place if self.padding_idx in rows[place : place + 1] else None

    def _apply(self, fn: Any, recurse: bool = True) -> HostEmbedding:
        """Convert the table as ``fn`` would, without moving it; where ``fn`` would move it, rows arrive from now on."""
        there, here = (fn(torch.empty(1, dtype=self.weight.dtype, device=device)) for device in (self.device, _CPU))
        is_shared = here.is_cpu and here.is_shared()
        if is_shared or there.dtype is not self.weight.dtype:
            if is_in_file(self.weight):
                wanted, dtype = "shared memory" if is_shared else there.dtype, self.weight.dtype
                raise TypeError(f"a table in a file would become {wanted}; expected it to stay {dtype} there")
            super()._apply(fn if is_shared else lambda tensor: tensor.to(there.dtype))  # type: ignore[no-untyped-call]
        self.device = there.device
        return self

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, mode={self.mode!r}, device={str(self.device)!r}"


def prefetched(
    loader: Iterable[_Batch], ids_of: Mapping[HostEmbedding, Callable[[_Batch], Tensor | Sequence[Tensor]]]
) -> Iterator[_Batch]:
    """Go through batches, and announce each to its tables while the one before it is trained on.

    Args:
        loader: of batches. The next one is loaded before a batch is used, so each must have memory of its own.
        ids_of: for each table a function of a batch: the ids that will be looked up in it, or a list of these.

    Examples:
        >>> import torch
        >>> from rowstep import HostEmbedding, SparseAdam, prefetched
        >>> table = HostEmbedding(1000, 8, device="cpu")
        >>> optimizer = SparseAdam(table.parameters())
        >>> loader = [{"ids": torch.randint(0, 1000, (32,))} for _ in range(10)]
        >>> for batch in prefetched(loader, {table: lambda batch: batch["ids"]}):
        ...     optimizer.zero_grad()
        ...     table(batch["ids"]).square().sum().backward()
        ...     optimizer.step()
    """
    before: list[_Batch] = []
    for batch in loader:
        for table, ids in ids_of.items():
            named = ids(batch)
            for each in [named] if isinstance(named, Tensor) else named:
                table.prefetch(each)
        yield from before
        before = [batch]
    yield from before


class _Arrived(torch.autograd.Function):
    """Rows of a table that were copied to a device, or those at some places among them.

    Backward, the gradient of each is summed in order of occurrence, and copied back.
    """

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, arrived: Tensor, rows: Tensor, padding: int | None,
        places: Tensor | None = None, by_frequency: bool = False,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(rows.long(), places)
        ctx.padding, ctx.by_frequency, ctx.shape = padding, by_frequency, weight.shape
        return arrived if places is None else F.embedding(places, arrived)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, places = ctx.saved_tensors
        if places is not None:
            wide, dim = grad.to(_wider(grad.dtype)), grad.shape[-1]
            if grad.is_cpu and not ctx.by_frequency:  # 13 ms for 65,536 x 64, and torch's own, below, 31
                summed = wide.new_zeros(len(rows), dim)
                summed.index_add_(0, places.reshape(-1), wide.reshape(places.numel(), dim))
            else:
                summed = torch.ops.aten.embedding_dense_backward(wide, places, len(rows), -1, ctx.by_frequency)
            grad = summed.to(grad.dtype)
        values = _transfer(grad, _CPU)
        if ctx.padding is not None:
            rows, values = (torch.cat([each[: ctx.padding], each[ctx.padding + 1 :]]) for each in (rows, values))
        gradient = torch.sparse_coo_tensor(
            rows[None], values, ctx.shape, device=values.device, is_coalesced=True, check_invariants=False
        )
        return gradient, *[None] * 5


def _wider(dtype: torch.dtype) -> torch.dtype:
    """The dtype to sum in: in bfloat16, 1,000 times 1 comes to 256."""
    return torch.float32 if dtype.itemsize == 2 else dtype


def _transfer(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device; itself if both are the CPU. Never run on a GPU.

    What goes to a GPU arrives in the order of its stream, and nobody waits. What comes from one is read by the CPU at
    once, so this waits for it: in a step, once for each gradient, and once for ids that are on the GPU.
    """
    if tensor.is_cpu:
        return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
    if device.type != "cpu":
        return tensor.to(device)
    arrived = torch.empty_like(tensor, device=_CPU, pin_memory=True).copy_(tensor, non_blocking=True)
    torch.accelerator.current_stream(tensor.device).record_event().synchronize()
    return arrived


def _table_in_file(path: _Path, key: str, shape: tuple[int, int], dtype: torch.dtype, padding: int | None) -> Tensor:
    from . import storage  # which needs Linux

    if not os.path.exists(path):
        weight = storage.create(path, *shape, dtype, nn.init.normal_, key=key)
        if padding is not None:
            weight[padding] = 0
            storage.sync(weight)
        return weight
    weight = storage.open(path, key, writable=True)
    if weight.shape != shape or weight.dtype is not dtype:
        found = f"{key!r} in {path} has shape {tuple(weight.shape)} and dtype {weight.dtype}"
        raise ValueError(f"{found}; expected {shape} and {dtype}. Pass those of the file, or another path")
    return weight

"""Many sharded tables that are looked up together.

A lookup over ranks costs four messages forward and two back, however few ids it has. Models with 26 or 800 tables would
pay that for each table in turn. A collection looks up all of its tables in one go: their ids, rows and gradients share
the same messages. A table for which a rank has no ids takes part with nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ._embedding import ShardedEmbedding, ShardedEmbeddingBag
from ._lookup import Arguments, JointLookup
from ._table import DIVIDED, EVERYWHERE

Plain = nn.Embedding | nn.EmbeddingBag
Sharded = ShardedEmbedding | ShardedEmbeddingBag

Ids = Tensor | tuple[Tensor | None, ...]
"""For an Embedding: ids of any shape. For an EmbeddingBag: a 2-D tensor, or a tuple of ids, offsets and weights."""

SMALL_TABLE_ROWS = 100
"""Tables of up to so many rows are everywhere, and larger ones are divided, unless the plan says otherwise.

A table with few rows per rank does not divide evenly: with 12 per rank, the fullest rank has up to 8% more than the
mean, with 3 a third more, and some ranks have none. Everywhere, every rank bears the same load. But every gradient goes
to every rank, which at W ranks takes W/2 times the bytes: of 100 rows of width 16 up to 0.4 MB per rank and step at 64
ranks. It is a number of rows, and not of rows per rank, so that a table is placed alike on any number of ranks: torch's
``dcp.load`` can then read what another number of ranks has saved.
"""


class ShardedEmbeddingCollection(nn.Module):
    """Sharded tables that are looked up together, in one set of messages for all of them.

    A lookup of one table takes six collectives, forward and backward together. A collection takes six for all of its
    tables, whatever their number, widths and dtypes.

    Args:
        tables: a plain ``nn.Embedding`` or ``nn.EmbeddingBag`` for each name. Every rank passes the same ones. If only
            sizes are given (a module on the meta device, or a tuple of rows and width for an Embedding), new rows are
            drawn on torch's default device, the same for any plan and any number of ranks that share a seed.
        plan: where each table is, by name: ``"divided"`` or ``"everywhere"``. It must be the same on every rank. Of
            the tables that it does not name, those of up to 100 rows are everywhere, and larger ones divided.
        gradient: how to combine the ranks' gradients of a row: ``"mean"`` or ``"sum"``.
        group: the process group; by default all ranks.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from rowstep.distributed import ShardedEmbeddingCollection
        >>> tables = ShardedEmbeddingCollection({"user": nn.Embedding(1000, 16), "tags": nn.EmbeddingBag(50, 8)})
        >>> read = tables({"user": torch.tensor([3, 5]), "tags": (torch.tensor([1, 2, 1]), torch.tensor([0, 2]))})
        >>> read["user"].shape, read["tags"].shape
        (torch.Size([2, 16]), torch.Size([2, 8]))
    """

    def __init__(
        self,
        tables: Mapping[str, Plain | tuple[int, int]],
        *,
        plan: Mapping[str, str] | None = None,
        gradient: Literal["mean", "sum"] = "mean",
        group: ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        plain = {name: _as_module(name, table) for name, table in tables.items()}
        if not plain:
            raise ValueError("there are no tables; expected at least one")
        plan = plan or {}
        if unknown := [name for name in plan if name not in plain]:
            raise ValueError(f"plan names {', '.join(map(repr, unknown))}; expected only {', '.join(map(repr, plain))}")
        small = {name for name, module in plain.items() if module.num_embeddings <= SMALL_TABLE_ROWS}
        self.plan = {name: plan.get(name, EVERYWHERE if name in small else DIVIDED) for name in plain}
        """Where each table is. For another plan, make another collection, and load a checkpoint into it."""
        self._tables: dict[str, Sharded] = {}
        for name, module in plain.items():
            kind: Any = ShardedEmbedding if isinstance(module, nn.Embedding) else ShardedEmbeddingBag
            table = kind.from_embedding(module, group=group, gradient=gradient, placement=self.plan[name])
            table.set_label(name)
            self._tables[name] = table.train(module.training)
            self.add_module(name, table)
        self._joint_lookup = JointLookup(list(self._tables.values()))

    # Tables

    def __getitem__(self, name: str) -> Sharded:
        return self._tables[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)

    def extra_repr(self) -> str:
        return "\n".join(table.described for table in self._tables.values())

    # Lookups

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # who sends how much depends on the ids
    def forward(self, ids: Mapping[str, Ids]) -> dict[str, Tensor]:
        """Look up ids by the name of their table. All ranks of the group call this together, each with its own ids.

        Args:
            ids: for an Embedding ids of any shape; for an EmbeddingBag a 2-D tensor, or a tuple of ids, offsets and
                weights. A rank may leave out a table: it has no ids for it then.

        Returns:
            What was looked up, by the name of the table.
        """
        results = self._joint_lookup.look_up(lambda: self._arguments(ids))
        return {name: result for name, result in zip(self._tables, results, strict=True) if result is not None}

    def _arguments(self, ids: Mapping[str, Ids]) -> list[Arguments | None]:
        if not isinstance(ids, Mapping):
            raise TypeError(f"the ids are a {type(ids).__name__}; expected a dict of ids by the name of their table")
        if unknown := [repr(name) for name in ids if name not in self._tables]:
            raise KeyError(f"no table is called {', '.join(unknown)}; there are {', '.join(map(repr, self._tables))}")
        return [_arguments_of(ids[name]) if name in ids else None for name in self._tables]

    @contextlib.contextmanager
    def ahead(self, ids: Mapping[str, Ids]) -> Iterator[None]:
        """Look up these ids in one go, for the tables' own lookups inside the block: those then send nothing.

        Inside the block, a table can be called once, with the ids announced for it.

        Args:
            ids: by the name of their table, as for a lookup.

        Examples:
            >>> import torch
            >>> from torch import nn
            >>> from rowstep.distributed import ShardedEmbeddingCollection
            >>> collection = ShardedEmbeddingCollection({"user": nn.Embedding(100, 8)})
            >>> model = nn.Sequential(collection["user"], nn.Linear(8, 1))
            >>> with collection.ahead({"user": torch.tensor([3, 5])}):
            ...     model(torch.tensor([3, 5])).shape
            torch.Size([2, 1])
        """
        try:
            for name, result in self(ids).items():
                # Copies: a program may write other ids to the same tensor before it looks them up.
                arguments = [each.clone() if isinstance(each, Tensor) else each for each in _arguments_of(ids[name])]
                self._tables[name].announced = tuple(arguments), result
            yield
        finally:
            for table in self._tables.values():
                table.announced = None


def _as_module(name: str, table: Plain | tuple[int, int]) -> Plain:
    module = nn.Embedding(*table, device="meta") if isinstance(table, tuple) else table
    if type(module) not in (nn.Embedding, nn.EmbeddingBag):
        raise TypeError(
            f"table {name!r} is a {type(module).__name__}; expected an nn.Embedding, an nn.EmbeddingBag, or a tuple of "
            "its rows and its width"
        )
    return module


def _arguments_of(ids: Ids) -> Arguments:
    return ids if isinstance(ids, tuple) else (ids,)

"""Rows of many tables, of any widths and dtypes, as the bytes of one message, and back.

Rows lie table by table, and in each table rank by rank; in a message they lie rank by rank, and for each rank table by
table. What is counted by rank and table here is bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Counts = Sequence[Sequence[int]]


class Kind(NamedTuple):
    """What the rows of a table are."""

    width: int
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return self.width * self.dtype.itemsize

    def of(self, message: Tensor, count: int) -> Tensor:
        """So many rows, sent as these bytes, which have to lie where the dtype may lie."""
        return message.view(self.dtype).view(count, self.width)


def as_bytes(rows: Tensor) -> Tensor:
    return rows.reshape(-1).view(torch.uint8)


def pack(tables: Sequence[Tensor], sizes: Counts) -> Tensor:
    """A message of the tables' bytes, of which each rank gets so many."""
    if len(tables) == 1:
        return tables[0]
    by_table = [torch.split(table, list(cut)) for table, cut in zip(tables, zip(*sizes, strict=True), strict=True)]
    return torch.cat([part for of_rank in zip(*by_table, strict=True) for part in of_rank])


def unpack(message: Tensor, sizes: Counts) -> list[list[Tensor]]:
    """By table, and then by rank, the bytes of a message; of a single table they are not cut."""
    tables = len(sizes[0])
    if tables == 1:
        return [[message]]
    parts = torch.split(message, [size for of_rank in sizes for size in of_rank])
    return [list(parts[table::tables]) for table in range(tables)]


def joined(parts: Sequence[Tensor]) -> Tensor:
    """One after the other. Parts of a message are copied, so that they lie where their dtype may lie."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))

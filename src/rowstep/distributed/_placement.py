"""Which rank owns which row: pure arithmetic.

A table is placed in one of two ways:

    divided      every rank owns a block of its rows, in an order of their own (``_layout``) that spreads popular ids
    everywhere   every rank has all of them, and steps them alike

    id ──order──> position ──placement──> (rank, row of that rank's block)
"""

from __future__ import annotations

from typing import NamedTuple

from .._layout import RowOrder

DIVIDED, EVERYWHERE = "divided", "everywhere"

SMALL_TABLE_ROWS = 100
"""A collection puts tables of up to so many rows everywhere, and divides larger ones, unless told otherwise.

A table with few rows per rank does not divide evenly: with 12 per rank, the fullest rank has up to 8% more than the
mean, with 3 a third more, and some ranks have none. Everywhere, every rank bears the same load. But every gradient goes
to every rank, which at W ranks takes W/2 times the bytes: of 100 rows of width 16 up to 0.4 MB per rank and step at 64
ranks. It is a number of rows, and not of rows per rank, so that a table is placed alike on any number of ranks: torch's
``dcp.load`` can then read what another number of ranks has saved.
"""


class Placement(NamedTuple):
    """Where the rows of one table are.

    Divided, its positions are cut into one block per rank, all of one size but the last ones, which may be shorter or
    empty. That is how ``torch.distributed.tensor.Shard(0)`` cuts a dimension, so a block is a shard to torch.
    """

    rows: int
    ranks: int
    place: str = DIVIDED

    @property
    def is_everywhere(self) -> bool:
        return self.place == EVERYWHERE

    @property
    def order(self) -> RowOrder:
        """In what order the rows lie."""
        return RowOrder.by_id(self.rows) if self.is_everywhere else RowOrder.spread(self.rows)

    @property
    def span(self) -> int:
        """How many rows the fullest rank holds, at least one, so that positions can be divided by it."""
        return max(1, self.rows if self.is_everywhere else -(-self.rows // self.ranks))

    def of(self, rank: int) -> range:
        """The positions that this rank holds."""
        first = 0 if self.is_everywhere else rank * self.span
        return range(min(first, self.rows), min(first + self.span, self.rows))

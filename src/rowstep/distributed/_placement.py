"""Which rank owns which row: pure arithmetic.

A table is placed in one of three ways:

    divided      every rank owns a block of its rows, in an order of their own (``_layout``) that spreads popular ids
    on one rank  that rank owns all of them, in the order of their ids
    everywhere   every rank has all of them, and steps them alike

    id ──order──> position ──placement──> (rank, row of that rank's block)
"""

from __future__ import annotations

from numbers import Integral
from typing import Literal, NamedTuple

from .._layout import RowOrder

DIVIDED, EVERYWHERE = "divided", "everywhere"

Place = str | int
"""What users write: ``"divided"``, ``"everywhere"``, or the number of the rank that gets the whole table."""


class Blocks(NamedTuple):
    """Positions cut into one block per rank, all of one size but the last ones, which may be shorter or empty.

    That is how ``torch.distributed.tensor.Shard(0)`` cuts a dimension, so a block is a shard to torch's checkpoints.
    """

    rows: int
    ranks: int

    @property
    def size(self) -> int:
        """Rows of a full block; at least 1, so that positions can be divided by it."""
        return max(1, -(-self.rows // self.ranks))

    def of(self, rank: int) -> range:
        """The positions that this rank owns."""
        return range(min(rank * self.size, self.rows), min((rank + 1) * self.size, self.rows))


class Placement(NamedTuple):
    """Where the rows of one table are."""

    rows: int
    ranks: int
    place: Place = DIVIDED

    @classmethod
    def checked(cls, rows: int, ranks: int, place: Place) -> Placement:
        """The placement that a user asks for."""
        if isinstance(place, Integral) and not isinstance(place, bool):  # NumPy's too
            place = int(place)
        is_rank = type(place) is int
        if place not in (DIVIDED, EVERYWHERE) if not is_rank else not 0 <= place < ranks:  # type: ignore[operator]
            raise ValueError(
                f"Invalid placement: {place!r}; expected {DIVIDED!r}, {EVERYWHERE!r} or the number of one of the "
                f"{ranks} ranks"
            )
        return cls(rows, ranks, place)

    @property
    def order(self) -> RowOrder:
        """In what order the rows lie."""
        return RowOrder.spread(self.rows) if self.place == DIVIDED else RowOrder.by_id(self.rows)

    def of(self, rank: int) -> range:
        """The positions that this rank holds."""
        if self.place == DIVIDED:
            return Blocks(self.rows, self.ranks).of(rank)
        return range(self.rows if self.place in (EVERYWHERE, rank) else 0)

    def seen_from(self, rank: int) -> Literal["divided", "here", "elsewhere", "everywhere"]:
        """Where the table is for this rank."""
        if isinstance(self.place, str):
            return "divided" if self.place == DIVIDED else "everywhere"
        return "here" if self.place == rank else "elsewhere"

    @property
    def span(self) -> int:
        """How many rows the fullest rank holds, at least one."""
        return Blocks(self.rows, self.ranks).size if self.place == DIVIDED else max(1, self.rows)

    def blocks(self) -> list[tuple[int, range]]:
        """The first position of each block that rows are cut into, and the ranks that hold it."""
        if self.place == DIVIDED:
            size = Blocks(self.rows, self.ranks).size
            return [(min(rank * size, self.rows), range(rank, rank + 1)) for rank in range(self.ranks)]
        return [(0, range(self.ranks) if isinstance(self.place, str) else range(self.place, self.place + 1))]

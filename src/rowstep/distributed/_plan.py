"""Which rank owns which row, and what a lookup costs: pure arithmetic.

Rows lie in an order of their own (``_layout``), and each rank owns one block of it:

    id ──order──> position ──block──> (rank, row of that rank's block)
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor


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

    def cut(self, sorted_positions: Tensor) -> list[int]:
        """How many of these positions each rank owns."""
        starts = torch.arange(1, self.ranks, device=sorted_positions.device) * self.size
        starts = starts.clamp(max=self.rows).to(sorted_positions.dtype)
        ends = [0, *torch.searchsorted(sorted_positions, starts).tolist(), len(sorted_positions)]
        return [end - start for start, end in itertools.pairwise(ends)]


def bytes_per_step(ids: int, distinct: float, width: int, ranks: int, *, element: int = 4, index: int = 4) -> float:
    """Bytes that one rank sends to others for one lookup and its gradient.

    Each rank looks up ``ids`` ids, of which a share ``distinct`` is distinct. Other ranks own all but one in ``ranks``
    of these: the rank sends their numbers and gradients, and sends as many rows to ranks that ask for them. It also
    sends a header of 16 bytes and a vote of 4 to every other rank. ``docs/scaling.md`` derives the formula.
    """
    others = (ranks - 1) / ranks
    return others * ids * distinct * (index + 2 * width * element) + 20 * (ranks - 1)

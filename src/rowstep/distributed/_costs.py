"""What a lookup and its backward pass send: pure arithmetic."""

from __future__ import annotations

MEETINGS = 3 * 16
"""Bytes for each other rank: the headers of both passes, and the vote."""


def bytes_per_step(ids: int, distinct: float, width: int, ranks: int, *, element: int = 4, index: int = 4) -> float:
    """Bytes that one rank sends to others for one lookup and its gradient.

    Other ranks own all but one in ``ranks`` of the distinct ids. The rank sends their numbers and gradients, and sends
    as many rows to ranks that ask for them. It also sends two headers and a vote of 16 bytes each to every other rank:

        ids · distinct · (ranks - 1) / ranks · (index + 2 · width · element) + 48 · (ranks - 1)

    ``docs/scaling.md`` derives the formula.

    Args:
        ids: how many each rank looks up.
        distinct: the share of these that is distinct.
        width: of the table.
        ranks: how many there are.
        element: bytes of a weight.
        index: bytes of a row number.

    Examples:
        >>> from rowstep.distributed import bytes_per_step
        >>> f"{bytes_per_step(65_536, distinct=0.487, width=64, ranks=64) / 1e6:.1f} MB"
        '16.2 MB'
    """
    others = (ranks - 1) / ranks
    return others * ids * distinct * (index + 2 * width * element) + MEETINGS * (ranks - 1)

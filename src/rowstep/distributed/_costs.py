"""What a lookup and its backward pass send: pure arithmetic."""

from __future__ import annotations

MEETINGS = 3 * 16
"""Bytes for each other rank: the headers of both passes, and the vote."""


def bytes_per_step(ids: int, distinct: float, width: int, ranks: int, *, element: int = 4, index: int = 4) -> float:
    """Bytes that one rank sends to others for one lookup and its gradient.

    Each rank looks up ``ids`` ids, of which a share ``distinct`` is distinct. Other ranks own all but one in ``ranks``
    of these: the rank sends their numbers and gradients, and sends as many rows to ranks that ask for them. It also
    sends two headers and a vote of 16 bytes each to every other rank. ``docs/scaling.md`` derives the formula.
    """
    others = (ranks - 1) / ranks
    return others * ids * distinct * (index + 2 * width * element) + MEETINGS * (ranks - 1)

"""A lookup over ranks: four messages, in which every rank takes part whether it has ids or not.

    headers   each rank tells each other what it looks up, how many rows it wants, and whether it can go on at all
    ids       the rows wanted, as numbers in the owner's block
    vote      whether every owner could read what it was asked for
    rows      what was asked for, from the owners to those who asked; in the backward pass gradients go the other way

An exception that one rank meets on the way travels with its header or its vote: every rank learns of it in the same
call and raises, and nobody waits for rows that never come.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from . import _exchange
from ._dedupe import Deduped
from ._exchange import Route


class Request(NamedTuple):
    """What a rank wants of the others."""

    wanted: Deduped
    """The positions that it looks up."""
    numbers: Tensor
    """The same as numbers in their owners' blocks, owner by owner."""
    counts: list[int]
    """How many of each owner."""


def fetch_rows(
    ask: Callable[[], Request],
    read: Callable[[Tensor], Tensor],
    group: ProcessGroup,
    *,
    table: int,
    has_backward: bool,
    divisor: int,
) -> tuple[Tensor, Deduped]:
    """The rows that this rank asks for, one for each distinct position, and those positions.

    ``ask`` says what this rank wants, and ``read`` reads rows of its own block for whoever wants them; either may
    raise. ``table`` and ``has_backward`` must be the same on all ranks. Gradients are divided by ``divisor``.
    """
    # Headers: how many rows each wants of each. A rank that cannot go on still sends one, and wants nothing.
    request, failure = _exchange.attempt(ask, instead=_nothing(group))
    owed = _exchange.swap_headers(request.counts, failure, group, table=table, has_backward=has_backward)
    way = Route(asked=request.counts, owed=owed, group=group)

    # Ids: which rows. They go to the owners, in the opposite direction to the rows.
    asked_of_me = _exchange.send_ids(request.numbers, way.back)

    # Vote: to read rows may fail (deferred ones catch up first, and memory may run out). Every rank has to hear of it
    # before it waits for rows.
    rows = _exchange.agree(lambda: read(asked_of_me.to(torch.int64)), group)

    # Rows: in the order of the ids that were sent, which is that of the positions.
    return _exchange.send_rows(rows, way, divisor=divisor), request.wanted


def _nothing(group: ProcessGroup) -> Request:
    _, ranks = _exchange.ranks_of(group)
    none = torch.empty(0)
    return Request(Deduped(none, none, none, none), none, [0] * ranks)

"""How the rows of one lookup travel from their owners to those who asked, and their gradients back.

A gradient arrives as what each rank has summed for each row that it asked for, rank by rank, and becomes a sparse
gradient of the owner's rows. A rank whose loss leaves a table out says so: its rows of that table then count as not
looked up, and a table that all ranks leave out has no gradient, as in one process.

Tables of ids whose rows are of one kind are a group. Their rows lie in one tensor, so that what is done for each id,
there and back, is one call for all of them: 26 calls for small tables took as long as the messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from . import _exchange
from ._costs import LINE
from ._dedupe import Deduped, sum_duplicates
from ._map import Counts
from ._parcels import Kind, as_bytes, joined, pack, unpack
from ._placement import EVERYWHERE
from ._topic import Topic, ledger_of

if TYPE_CHECKING:
    from ._table import ShardedTable

Arrived = tuple[Tensor, Tensor]
"""Rows of a table here, and their gradients."""


class Group(NamedTuple):
    """Tables whose rows are of one kind, and that hand them out for each id; or one table of bags, which does not."""

    tables: range
    kind: Kind
    for_each_id: bool


class Journey(NamedTuple):
    """What has to be known for the way there and back."""

    tables: Sequence[ShardedTable]
    groups: Sequence[Group]
    topic: Topic
    number: int
    wanted: Counts
    """How many rows this rank has asked for."""
    asked: Counts
    """How many it was asked for."""
    rows: Sequence[Tensor]
    """Which ones, of each table here, rank by rank."""
    found: Sequence[Deduped]
    """Of each group, which distinct row each id has."""
    lengths: Sequence[int]
    """How many ids each table has."""
    has_grads: Sequence[bool]

    @property
    def is_alone(self) -> bool:
        return self.tables[0].ranks == 1

    @property
    def divisor(self) -> int:
        """What gradients are divided by."""
        return self.tables[0].ranks if self.tables[0].gradient == "mean" else 1

    def is_everywhere(self, number: int) -> bool:
        return self.tables[number].placement.place == EVERYWHERE

    def swap(self, kind: str, topic: Topic, tables: Sequence[Tensor], counts: Counts, expected: Counts) -> Any:
        """Send so many rows of these tables to each rank; return the bytes that arrive, by table and by rank."""
        sizes = [group.kind.bytes for group in self.groups for _ in group.tables]
        if len(tables) > len(sizes):
            sizes = [1, *sizes]  # a line before the rows
        sent, expected = (
            [[count * size for count, size in zip(each, sizes, strict=True)] for each in way]
            for way in (counts, expected)
        )
        message = pack([as_bytes(table) for table in tables], sent)
        group = self.tables[0].group
        return unpack(_exchange.swap(kind, message, [*map(sum, sent)], [*map(sum, expected)], topic, group), expected)


def bring_rows(journey: Journey, read: Sequence[Tensor]) -> Sequence[Tensor]:
    """Give each rank what it has asked for of what was read here. Return by table a row for each id, or its rows."""
    weights = [table.weight for table in journey.tables]
    received: tuple[Tensor, ...] = _Rows.apply(journey, read, *weights)  # type: ignore[no-untyped-call]
    return received


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, journey: Journey, read: Sequence[Tensor], *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.journey = journey
        ctx.set_materialize_grads(False)
        received: list[Tensor] = []
        for group, rows, found in zip(journey.groups, _swap_rows(journey, read), journey.found, strict=True):
            if group.for_each_id:
                lengths = [journey.lengths[table] for table in group.tables]
                # Not views in the eyes of autograd, which would not let users write to them.
                received += torch.unsafe_split_with_sizes(rows.index_select(0, found.places.reshape(-1)), lengths)
            else:
                received.append(rows)
        frozen = [rows for rows, has_grad in zip(received, journey.has_grads, strict=True) if not has_grad]
        ctx.mark_non_differentiable(*frozen)
        return tuple(received)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        journey: Journey = ctx.journey
        ledger_of(journey.tables[0].group).begin_backward(journey.number)
        sums = [of_table for number in range(len(journey.groups)) for of_table in _sums(journey, number, grads)]
        arrived = _swap_gradients(journey, sums, [grad is not None for grad in grads])
        gradients = (
            table.gradient_of(*found) if found is not None else None
            for table, found in zip(journey.tables, arrived, strict=True)
        )
        return None, None, *gradients


# There


def _swap_rows(journey: Journey, read: Sequence[Tensor]) -> list[Tensor]:
    """The rows that this rank has asked for, by group."""
    if journey.is_alone:
        return [joined([read[table] for table in group.tables]) for group in journey.groups]
    given, taken = _without_copies(journey, journey.asked), _without_copies(journey, journey.wanted)
    sent = [
        torch.split(rows, [each[number] for each in journey.asked])[journey.tables[0].rank]
        if journey.is_everywhere(number)
        else rows
        for number, rows in enumerate(read)
    ]
    parts = journey.swap("rows", journey.topic, sent, given, taken)
    return [
        group.kind.of(
            joined([part for table in group.tables for part in parts[table]]),
            sum(each[table] for each in taken for table in group.tables),
        )
        for group in journey.groups
    ]


def _without_copies(journey: Journey, counts: Counts) -> Counts:
    """Of a table that is everywhere, only the rows that a rank has asked itself for."""
    skipped = [journey.is_everywhere(number) for number in range(len(journey.tables))]
    if not any(skipped):
        return counts
    return [
        each
        if rank == journey.tables[0].rank
        else [0 if skip else count for count, skip in zip(each, skipped, strict=True)]
        for rank, each in enumerate(counts)
    ]


# And back


def _sums(journey: Journey, number: int, grads: Sequence[Tensor | None]) -> Sequence[Tensor]:
    """For each table of a group, the sum of the gradients of each distinct row; 0 where the loss leaves it out."""
    group, found = journey.groups[number], journey.found[number]
    own = [grads[table] for table in group.tables]
    counts = [journey.lengths[table] for table in group.tables] if group.for_each_id else [len(found.numbers)]
    kind, device = group.kind, found.numbers.device
    values = joined(
        [
            torch.zeros(count, kind.width, dtype=kind.dtype, device=device) if grad is None else grad.contiguous()
            for grad, count in zip(own, counts, strict=True)
        ]
    )
    sums = sum_duplicates(values, found) if group.for_each_id else values
    if journey.divisor > 1:  # before it is sent: of many small tables, once instead of for each
        sums = sums / journey.divisor
    return torch.split(sums, [_distinct(journey, table) for table in group.tables])


def _distinct(journey: Journey, number: int) -> int:
    """How many distinct rows of a table this rank has asked for."""
    ranks = journey.wanted[:1] if journey.is_everywhere(number) else journey.wanted
    return sum(counts[number] for counts in ranks)


def _swap_gradients(journey: Journey, sums: Sequence[Tensor], used: list[bool]) -> list[Arrived | None]:
    """Of each table, the rows here that have a gradient, and their gradients."""
    if journey.is_alone:
        arrived = zip(journey.rows, sums, strict=True)
        return [each if is_used else None for each, is_used in zip(arrived, used, strict=True)]
    ranks = len(journey.wanted)
    topic = journey.topic.then("backward pass", journey.number)
    _exchange.meet(topic, [0] * ranks, journey.tables[0].group)
    sent = [
        grads[:0] if not has_grad else grads.repeat(ranks, 1) if journey.is_everywhere(number) else grads
        for number, (grads, has_grad) in enumerate(zip(sums, journey.has_grads, strict=True))
    ]
    given, expected = (
        [[count * has_grad for count, has_grad in zip(each, journey.has_grads, strict=True)] for each in way]
        for way in (journey.wanted, journey.asked)
    )
    if len(sent) == 1:  # there is no backward pass without its gradient
        (parts,) = journey.swap("gradients", topic, sent, given, expected)
        return [_arrived(journey, 0, parts, None)]

    # A line before the rows: which tables the loss depends on.
    line = bytes(used) + bytes(-len(used) % LINE)
    lines = torch.frombuffer(bytearray(line * ranks), dtype=torch.uint8).to(sums[0].device)
    given, expected = ([[len(line), *each] for each in way] for way in (given, expected))
    of_lines, *of_tables = journey.swap("gradients", topic, [lines, *sent], given, expected)
    uses = [of_rank.tolist() for of_rank in of_lines]
    return [_arrived(journey, number, parts, [use[number] for use in uses]) for number, parts in enumerate(of_tables)]


def _arrived(journey: Journey, number: int, parts: list[Tensor], uses: list[bool] | None) -> Arrived | None:
    """What has arrived for a table, of ranks whose loss depends on it."""
    rows = journey.rows[number]
    if not journey.tables[number].is_here:
        return None
    if uses is not None and not all(uses):
        if not any(uses):
            return None
        of_ranks = torch.split(rows, [counts[number] for counts in journey.asked])
        rows = joined([part for part, is_used in zip(of_ranks, uses, strict=True) if is_used])
        parts = [part for part, is_used in zip(parts, uses, strict=True) if is_used]
    kind = next(group.kind for group in journey.groups if number in group.tables)
    message = joined(parts)
    return rows, kind.of(message if message.storage_offset() == 0 else message.clone(), len(rows))

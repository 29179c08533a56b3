"""How the rows of one lookup travel from their owners to those who asked, and their gradients back.

A gradient arrives as what each rank has summed for each row that it asked for, rank by rank, and becomes a sparse
gradient of the owner's rows. A rank whose loss leaves a table out says so: its rows of that table then count as not
looked up, and a table that all ranks leave out has no gradient, as in one process.

Tables whose rows are of one kind are a group. The rows that a rank gets of a group lie in one tensor, in the order of
the messages, so that what is done for each id, there and back, is one call for all of the tables, and next to nothing
has to be copied: 26 calls for small tables took as long as the messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from . import _exchange
from ._map import Counts, Deduped, sum_duplicates
from ._operation import Operation, pending_of

if TYPE_CHECKING:
    from ._table import ShardedTable

_ALIGNED = 8  # bytes

Arrived = tuple[Tensor, Tensor]
"""Rows of a table here, and their gradients."""


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


class Group(NamedTuple):
    """Tables whose rows are of one kind and go the same ways; of bags, one table, whose rows are not handed out."""

    tables: range
    kind: Kind
    has_bags: bool
    is_everywhere: bool
    has_grad: bool

    def count(self, counts: Sequence[int]) -> int:
        """Of what is counted by table, what the group has."""
        return sum(counts[self.tables.start : self.tables.stop])


class Transfer(NamedTuple):
    """What has to be known for the way there and back."""

    tables: Sequence[ShardedTable[Any]]
    groups: Sequence[Group]
    """Those that are everywhere are last."""
    operation: Operation
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

    @property
    def is_alone(self) -> bool:
        return self.tables[0].ranks == 1

    @property
    def divisor(self) -> int:
        """What gradients are divided by."""
        return self.tables[0].ranks if self.tables[0].gradient == "mean" else 1

    def group_of(self, table: int) -> Group:
        return next(group for group in self.groups if table in group.tables)

    def swap(self, kind: str, operation: Operation, message: Tensor, sizes: Counts, expected: Counts) -> Tensor:
        """Send so many bytes to each rank; return those that arrive."""
        group = self.tables[0].group
        return _exchange.swap(kind, message, [*map(sum, sizes)], [*map(sum, expected)], operation, group)


def transfer_rows(transfer: Transfer, read: Sequence[Tensor]) -> Sequence[Tensor]:
    """Give each rank what it has asked for of what was read here. Return by table a row for each id, or its rows."""
    weights = [table.weight for table in transfer.tables]
    received: tuple[Tensor, ...] = _Rows.apply(transfer, read, *weights)  # type: ignore[no-untyped-call]
    return received


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, transfer: Transfer, read: Sequence[Tensor], *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.transfer = transfer
        ctx.set_materialize_grads(False)
        received: list[Tensor] = []
        for group, rows, found in zip(transfer.groups, _swap_rows(transfer, read), transfer.found, strict=True):
            if group.has_bags:
                received.append(rows)
            else:
                lengths = list(transfer.lengths[group.tables.start : group.tables.stop])
                # Not views in the eyes of autograd, which would not let users write to them.
                received += torch.unsafe_split_with_sizes(rows.index_select(0, found.places), lengths)
        ctx.mark_non_differentiable(
            *(received[table] for group in transfer.groups if not group.has_grad for table in group.tables)
        )
        return tuple(received)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        transfer: Transfer = ctx.transfer
        pending_of(transfer.tables[0].group).open.pop(transfer.number, None)
        pairs = zip(transfer.groups, transfer.found, strict=True)
        sums = [_sums(transfer, group, found, grads) if group.has_grad else None for group, found in pairs]
        used = [grad is not None for grad in grads]
        swap = _at_home if transfer.is_alone else _swap_gradients
        arrived = zip(transfer.tables, swap(transfer, sums, used), strict=True)
        gradients = (table.gradient_of(*found) if found is not None else None for table, found in arrived)
        return None, None, *gradients


# There


def _swap_rows(transfer: Transfer, read: Sequence[Tensor]) -> list[Tensor]:
    """The rows that this rank has asked for, by group."""

    def own(table: int) -> Tensor:
        """Of a table that is everywhere, the rows that this rank has asked itself for."""
        if transfer.is_alone:
            return read[table]
        of_ranks: Sequence[Tensor] = torch.split(read[table], [counts[table] for counts in transfer.asked])
        return of_ranks[transfer.tables[table].rank]

    groups = [group for group in transfer.groups if not group.is_everywhere and not transfer.is_alone]
    here = [joined([own(table) for table in group.tables]) for group in transfer.groups[len(groups) :]]
    if not groups:
        return here
    tables = range(groups[-1].tables.stop)
    sizes = [
        [count * transfer.group_of(table).kind.bytes for table, count in zip(tables, each, strict=False)]
        for each in transfer.asked
    ]
    expected = [[group.count(each) * group.kind.bytes for group in groups] for each in transfer.wanted]
    message = pack([as_bytes(read[table]) for table in tables], sizes)
    parts = unpack(transfer.swap("rows", transfer.operation, message, sizes, expected), expected)
    counts = [sum(group.count(each) for each in transfer.wanted) for group in groups]
    return [g.kind.of(joined(part), count) for g, part, count in zip(groups, parts, counts, strict=True)] + here


# And back


def _sums(transfer: Transfer, group: Group, found: Deduped, grads: Sequence[Tensor | None]) -> Tensor:
    """The sum of the gradients of each distinct row of a group; 0 where the loss leaves a table out."""
    counts = [len(found.numbers)] if group.has_bags else [transfer.lengths[table] for table in group.tables]
    kind, device = group.kind, found.numbers.device
    values = joined(
        [
            torch.zeros(count, kind.width, dtype=kind.dtype, device=device) if grad is None else grad.contiguous()
            for grad, count in zip((grads[table] for table in group.tables), counts, strict=True)
        ]
    )
    if group.has_bags:
        return values / transfer.divisor if transfer.divisor > 1 else values
    sums = sum_duplicates(values, found)
    return sums.div_(transfer.divisor) if transfer.divisor > 1 else sums


def _at_home(transfer: Transfer, sums: Sequence[Tensor | None], used: Sequence[bool]) -> list[Arrived | None]:
    """What one rank has of each table for itself."""
    arrived: list[Arrived | None] = []
    for group, of_group in zip(transfer.groups, sums, strict=True):
        counts = [transfer.wanted[0][table] for table in group.tables]
        parts = [None] * len(counts) if of_group is None else torch.split(of_group, counts)
        for table, part in zip(group.tables, parts, strict=True):
            arrived.append((transfer.rows[table], part) if part is not None and used[table] else None)
    return arrived


def _swap_gradients(transfer: Transfer, sums: Sequence[Tensor | None], used: list[bool]) -> list[Arrived | None]:
    """Of each table, the rows here that have a gradient, and their gradients."""
    operation = transfer.operation.then("backward pass", transfer.number)
    # Most losses depend on all tables. If one does not, a line in front of the rows says on which it does.
    line = bytes(used) + bytes(-len(used) % _ALIGNED)
    uses_all = all(used[table] for group in transfer.groups if group.has_grad for table in group.tables)
    lines = _exchange.synchronize(operation, 0 if uses_all else len(line), transfer.tables[0].group)

    with_grad = [(group, each) for group, each in zip(transfer.groups, sums, strict=True) if each is not None]
    sizes = [[group.count(each) * group.kind.bytes for group, _ in with_grad] for each in transfer.wanted]
    parts = [as_bytes(each.repeat(len(sizes), 1) if group.is_everywhere else each) for group, each in with_grad]
    if not uses_all:
        sizes = [[len(line), *each] for each in sizes]
        parts = [torch.frombuffer(bytearray(line * len(sizes)), dtype=torch.uint8).to(parts[0].device), *parts]
    of_tables = [(table, group.kind.bytes) for group, _ in with_grad for table in group.tables]
    expected = [
        [length, *(each[table] * size for table, size in of_tables)]
        for length, each in zip(lines, transfer.asked, strict=True)
    ]
    arrived = transfer.swap("gradients", operation, pack(parts, sizes), sizes, expected)
    if len(used) == 1 and not any(lines):
        return [_arrived(transfer, 0, [arrived], used)]
    of_lines, *by_table = unpack(arrived, expected)
    uses = [of_rank.tolist() or [True] * len(used) for of_rank in of_lines]
    found: list[Arrived | None] = [None] * len(used)
    for (table, _), of_table in zip(of_tables, by_table, strict=True):
        found[table] = _arrived(transfer, table, of_table, [use[table] for use in uses])
    return found


def _arrived(transfer: Transfer, number: int, parts: list[Tensor], uses: list[bool]) -> Arrived | None:
    """What has arrived for a table, of ranks whose loss depends on it."""
    if not any(uses):
        return None
    rows = transfer.rows[number]
    if not all(uses):
        of_ranks = torch.split(rows, [counts[number] for counts in transfer.asked])
        rows = joined([part for part, is_used in zip(of_ranks, uses, strict=True) if is_used])
        parts = [part for part, is_used in zip(parts, uses, strict=True) if is_used]
    message = joined(parts)
    aligned = message if message.storage_offset() == 0 else message.clone()
    return rows, transfer.group_of(number).kind.of(aligned, len(rows))


# Messages: rows of many tables, of any widths and dtypes, as bytes. Rows lie table by table, and in each table rank by
# rank; in a message they lie rank by rank, and for each rank table by table. Sizes are in bytes, by rank and table.


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

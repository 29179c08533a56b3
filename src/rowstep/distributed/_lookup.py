"""A lookup over ranks, in one table or in many at once, in which every rank takes part whether it has ids or not.

    headers     each rank tells each other what it looks up, how many rows it wants, and whether it has failed
    ids         the keys of the rows wanted, to their owners
    vote        whether every owner could read what was requested of it
    rows        the distinct rows, from their owners to the ranks that requested them

and in the backward pass

    headers     which lookup this is the backward pass of
    gradients   summed for each distinct row, to its owner; for a table that is everywhere, to all ranks

Each of these is one collective for all tables. An exception on one rank travels with its header or its vote: every rank
learns of it in the same call and raises, and nobody waits for rows that never come.

A rank whose loss leaves a table out says so: its rows of that table then count as not looked up. A table that all ranks
leave out has no gradient, as in one process.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from .._torch_internals import parameters_of_ddp, running_ddp
from . import _exchange
from ._dedupe import Deduped, dedupe, sum_duplicates
from ._exchange import Counts
from ._operation import Operation, fingerprint, pending_of

if TYPE_CHECKING:
    from ._table import ShardedTable

Arguments = tuple[Any, ...]
"""What a table is looked up with: its ids, and for bags what else torch's EmbeddingBag takes."""


class Request(NamedTuple):
    """What this rank wants."""

    arguments: Sequence[Arguments | None]
    lengths: list[int]
    """How many ids each table has."""
    groups: list[tuple[list[int], Deduped]]
    """Tables whose rows are of one kind, by number, and their distinct keys; a table of bags is a group by itself.

    What is done for each id is one call for a group: 26 calls for small tables took as long as the messages.
    """
    counts: Counts
    """How many rows of each table it wants from each rank."""
    message: Tensor
    """The distinct keys, rank by rank and table by table."""


class Transfer(NamedTuple):
    """What the rows of a lookup, and later their gradients, need to find their way."""

    tables: Sequence[ShardedTable[Any]]
    operation: Operation
    number: int
    request: Request
    rows: Sequence[Tensor]
    """For each table, the rows here that ranks have requested, rank by rank."""
    served: Counts
    """How many of them each rank has requested."""


class JointLookup:
    """Looks up tables that share a process group together: always the same ones, in the same order.

    A row has a key: its position, plus where its table starts among all. Distinct keys in ascending order are sorted by
    table, and within a table by owner. (A table that is everywhere has room for a block per rank too, and uses one.)
    """

    def __init__(self, tables: Sequence[ShardedTable[Any]]) -> None:
        self._tables, self._ranks = tables, tables[0].ranks
        blocks = [max(1, len(table.blocks[0])) for table in tables]
        *self._starts, end = itertools.accumulate((block * self._ranks for block in blocks), initial=0)
        self._block_starts = [
            [start + rank * block for rank in range(self._ranks)]
            for start, block in zip(self._starts, blocks, strict=True)
        ]
        """The first key of each table and rank."""
        self._key_dtype = torch.int32 if end < 2**31 else torch.int64  # sorts 1.4x faster
        self._operations: dict[tuple[object, ...], Operation] = {}
        self._is_compared = False
        """Whether ranks have found that they begin with the same rows, where every rank has all of them."""

    def look_up(self, arguments: Callable[[], Sequence[Arguments | None]]) -> list[Tensor | None]:
        """One result for each table, or None. All ranks call this together.

        ``arguments`` returns what to look up in each table, None where that is nothing; it may raise.
        """
        has_grads = tuple(torch.is_grad_enabled() and table.weight.requires_grad for table in self._tables)
        group, operation = self._tables[0].group, self._operation(has_grads)

        # Headers: how many rows each wants of each. A rank that cannot go on still sends one, and wants nothing.
        request, failure = _exchange.attempt(lambda: self._request(arguments()))
        wanted = [0] * self._ranks if request is None else [*map(sum, zip(*request.counts, strict=True))]
        lengths = _exchange.synchronize(operation, wanted, group, failure=failure)
        assert request is not None, "or its failure was raised"
        self._is_compared = True
        pending = pending_of(group)
        number = pending.next_number()

        # Ids: which rows. They go to the owners, in the opposite direction to the rows.
        (parts,) = _exchange.all_to_all("ids", [request.message], [wanted], [lengths], operation, group)
        rows, served = self._rows_of(_exchange.as_rows(parts, sum(lengths), like=request.message), lengths)

        # Vote: to read rows may fail (deferred ones catch up first, and memory may run out). Every rank has to hear of
        # it before it waits for rows.
        read = _exchange.agree(operation.then("vote", number), lambda: self._read(rows), group)

        # Rows, and a node of the graph that will send their gradients.
        transfer = Transfer(self._tables, operation, number, request, rows, served)
        weights = [table.weight for table in self._tables]
        received: tuple[Tensor, ...] = _SendRows.apply(transfer, read, *weights)  # type: ignore[no-untyped-call]
        if any(has_grads):
            pending.expect_backward(number, self.name)
        results: list[Tensor | None] = [None] * len(self._tables)
        for of_one_kind, distinct in request.groups:
            for table in of_one_kind:
                if (own := request.arguments[table]) is not None:
                    results[table] = self._tables[table].finish(received[table], distinct.places, *own)
        return results

    @property
    def name(self) -> str:
        labels = [table.label for table in self._tables]
        return ", ".join(labels[:3]) + (f" and {len(labels) - 3} more" if len(labels) > 3 else "")

    def _operation(self, has_grads: tuple[bool, ...]) -> Operation:
        """What ranks must have in common to look up together."""
        facts = (
            self._is_compared,
            has_grads,
            *((table.identity, table.label, table.weight.dtype) for table in self._tables),
        )
        if facts not in self._operations or not self._is_compared:  # rows that were compared may have changed since
            words = [
                f"{table.described}, {'with' if has_grad else 'without'} gradients"
                + ("" if self._is_compared else table.checksum_in_words())
                for table, has_grad in zip(self._tables, has_grads, strict=True)
            ]
            key = fingerprint([table.identity for table in self._tables], words)
            self._operations[facts] = Operation(f"lookup of {self.name}", key, words)
        return self._operations[facts]

    def _request(self, arguments: Sequence[Arguments | None]) -> Request:
        refuse_torchs_ddp([table.weight for table in self._tables])
        none = torch.empty(0, dtype=torch.int64, device=self._tables[0].weight.device)
        keys: list[Tensor] = []
        by_kind: dict[object, list[int]] = {}
        for number, (table, own) in enumerate(zip(self._tables, arguments, strict=True)):
            kind = number if table.has_bags else (table.embedding_dim, table.weight.dtype)
            by_kind.setdefault(kind, []).append(number)
            try:
                ids = none if own is None else table.check(*own)
            except (IndexError, RuntimeError, TypeError, ValueError) as error:
                if len(self._tables) == 1:
                    raise
                raise type(error)(f"{table.label}: {error}") from error
            keys.append((table.positions(ids) + self._starts[number]).to(self._key_dtype))
        groups = [(group, dedupe(torch.cat([keys[number] for number in group]))) for group in by_kind.values()]
        parts: list[tuple[Tensor, ...]] = [()] * len(keys)
        for group, distinct in groups:
            of_owners = _cut(distinct.numbers, [start for number in group for start in self._block_starts[number]])
            for first, number in zip(range(0, len(of_owners), self._ranks), group, strict=True):
                parts[number] = of_owners[first : first + self._ranks]
                if self._tables[number].is_everywhere:  # it is one block, and every rank is sent all of the keys
                    parts[number] = parts[number][:1] * self._ranks
        counts = [[*map(len, of_ranks)] for of_ranks in parts]
        message = torch.cat([part for of_rank in zip(*parts, strict=True) for part in of_rank])
        return Request(arguments, [*map(len, keys)], groups, counts, message)

    def _rows_of(self, keys: Tensor, lengths: list[int]) -> tuple[list[Tensor], Counts]:
        """The rows of each table here that ranks have requested by these keys, and how many each of them has."""
        parts = [*zip(*(_cut(part, self._starts) for part in torch.split(keys, lengths)), strict=True)]
        served = [[*map(len, of_ranks)] for of_ranks in parts]
        by_table = torch.cat([part for of_ranks in parts for part in of_ranks]).to(torch.int64)
        of_tables = zip(self._tables, torch.split(by_table, [*map(sum, served)]), self._block_starts, strict=True)
        return [part - starts[0 if table.is_everywhere else table.rank] for table, part, starts in of_tables], served

    @torch.no_grad()  # their gradient comes with the transfer
    def _read(self, rows: list[Tensor]) -> list[Tensor]:
        return [table.read(numbers) for table, numbers in zip(self._tables, rows, strict=True)]


class _SendRows(torch.autograd.Function):
    """From what was read here to a row for each id or, of bags, for each distinct id; backward, their gradients."""

    @staticmethod
    def forward(ctx: Any, transfer: Transfer, read: Sequence[Tensor], *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.transfer = transfer
        ctx.set_materialize_grads(False)
        tables, request, sent = transfer.tables, transfer.request, list(read)
        sizes, expected = list(transfer.served), list(request.counts)
        for number, table in enumerate(tables):
            if table.is_everywhere:  # every rank reads all that is requested, but needs only its own
                sent[number] = torch.split(read[number], sizes[number])[table.rank]
                own = [len(sent[number]) if rank == table.rank else 0 for rank in range(table.ranks)]
                sizes[number] = expected[number] = own
        arrived = _exchange.all_to_all("rows", sent, sizes, expected, transfer.operation, tables[0].group)
        received = list(read)
        for group, distinct in request.groups:
            parts = [part for number in group for part in arrived[number]]
            rows = _exchange.as_rows(parts, len(distinct.numbers), like=read[group[0]])
            if tables[group[0]].has_bags:
                received[group[0]] = rows
                continue
            lengths = [request.lengths[number] for number in group]
            # Not views in the eyes of autograd, which would not let users write to them.
            of_tables = torch.unsafe_split_with_sizes(rows.index_select(0, distinct.places), lengths)
            for number, rows_of_ids in zip(group, of_tables, strict=True):
                received[number] = rows_of_ids
        ctx.zeros = [partial(torch.zeros, rows.shape, dtype=rows.dtype, device=rows.device) for rows in received]
        needed = zip(received, ctx.needs_input_grad[2:], strict=True)
        ctx.mark_non_differentiable(*(rows for rows, is_needed in needed if not is_needed))
        return tuple(received)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        transfer: Transfer = ctx.transfer
        tables, group, ranks = transfer.tables, transfer.tables[0].group, transfer.tables[0].ranks
        pending_of(group).open.pop(transfer.number, None)
        operation = transfer.operation.then("backward pass", transfer.number)
        needed = [number for number, is_needed in enumerate(ctx.needs_input_grad[2:]) if is_needed]

        # Most losses depend on all tables. If one does not, every rank also sends which tables its own depends on.
        used = [grads[number] is not None for number in needed]
        is_partly_used = any(_exchange.synchronize(operation, int(not all(used)), group))
        sums = _sums(
            transfer, [zeros() if grad is None else grad for grad, zeros in zip(grads, ctx.zeros, strict=True)]
        )
        sent = [sums[n].repeat(ranks, 1) if tables[n].is_everywhere else sums[n] for n in needed]
        sizes = [transfer.request.counts[number] for number in needed]
        expected = [transfer.served[number] for number in needed]
        if is_partly_used:
            sent.append(torch.tensor([used] * ranks, device=sent[0].device))
            sizes, expected = [*sizes, [1] * ranks], [*expected, [1] * ranks]
        arrived = _exchange.all_to_all("gradients", sent, sizes, expected, operation, group)
        of_ranks = _exchange.as_rows(arrived.pop(), ranks, like=sent[-1]).tolist() if is_partly_used else [used] * ranks

        gradients: list[Tensor | None] = [None] * len(tables)
        for number, parts, uses in zip(needed, arrived, zip(*of_ranks, strict=True), strict=True):
            table, rows = tables[number], transfer.rows[number]
            values = _exchange.as_rows(parts, len(rows), like=sums[number])
            if ranks > 1 and table.gradient == "mean":
                values.div_(ranks)
            if not all(uses):
                kept = torch.tensor(uses).repeat_interleave(torch.tensor(transfer.served[number])).to(rows.device)
                rows, values = rows[kept], values[kept]
            gradients[number] = table.gradient_of(rows, values) if any(uses) else None
        return None, None, *gradients


def _sums(transfer: Transfer, grads: Sequence[Tensor]) -> list[Tensor]:
    """By table, the gradient of each distinct row."""
    sums = list(grads)
    for group, distinct in transfer.request.groups:
        if not transfer.tables[group[0]].has_bags:
            of_group = sum_duplicates(_exchange.joined([grads[number] for number in group]).contiguous(), distinct)
            counts = ((transfer.tables[number], transfer.request.counts[number]) for number in group)
            lengths = [count[0] if table.is_everywhere else sum(count) for table, count in counts]
            for number, part in zip(group, torch.split(of_group, lengths), strict=True):
                sums[number] = part
    return sums


def _cut(ascending: Tensor, starts: list[int]) -> tuple[Tensor, ...]:
    """The numbers from each start up to the next."""
    bounds = torch.tensor(starts[1:], dtype=ascending.dtype, device=ascending.device)
    return torch.tensor_split(ascending, torch.searchsorted(ascending, bounds).tolist())


def refuse_torchs_ddp(weights: Sequence[Tensor]) -> None:
    """Raise inside torch's own DistributedDataParallel."""
    active = running_ddp()
    if isinstance(active, DistributedDataParallel):
        inside = {id(param) for param in parameters_of_ddp(active)}
        if any(id(weight) in inside for weight in weights):
            raise RuntimeError(
                "a model with a sharded table was wrapped in torch's DistributedDataParallel, which has overwritten "
                "every rank's rows with those of rank 0. Recreate the model and use rowstep.distributed.ddp instead"
            )

"""A lookup over ranks, in one table or in many at once, in which every rank takes part whether it has ids or not.

    headers     each rank tells each other what it looks up, how many rows it wants, and whether it can go on at all
    ids         the rows wanted, as numbers that their owner understands
    vote        whether every owner could read what it was asked for
    rows        what was asked for, from the owners to those who asked

and in the backward pass (``_transfer``)

    headers     which lookup this is the backward pass of
    gradients   of the rows, to their owners; of a table that is everywhere, to all

An exception that one rank meets on the way travels with its header or its vote: every rank learns of it in the same
call and raises, and nobody waits for rows that never come.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from .._torch_internals import parameters_of_ddp, running_ddp
from . import _exchange
from ._dedupe import Deduped, dedupe
from ._map import Counts, JointMap, Request, cut
from ._operation import Operation, fingerprint, pending_of
from ._transfer import Group, Transfer, transfer_rows

if TYPE_CHECKING:
    from ._table import ShardedTable


class Lookup(NamedTuple):
    """What one rank looks up in one table."""

    check: Callable[[], Tensor]
    """The ids, of any shape; raises if they, or other arguments, cannot be taken."""
    reduce: Callable[[Tensor, Deduped], Tensor] | None = None
    """What becomes of distinct rows, and of which of them each id has; None: a row for each id."""


class Asked(NamedTuple):
    """What this rank wants, in all tables."""

    lookups: Sequence[Lookup | None]
    shapes: list[torch.Size]
    """Of each table's ids."""
    found: Deduped
    request: Request


class JointLookup:
    """Where tables that share a group are looked up together: always the same ones, in the same order."""

    def __init__(self, tables: Sequence[ShardedTable], name: str) -> None:
        kinds = [
            (table.placement.is_everywhere, table.has_bags, table.embedding_dim, str(table.weight.dtype))
            for table in tables
        ]
        self._order = sorted(range(len(tables)), key=kinds.__getitem__)
        """In which tables of one kind follow each other, and those that are everywhere come last."""
        self._tables = [tables[number] for number in self._order]
        self._name, self._group = name, tables[0].group
        ranks = tables[0].ranks
        self._map = JointMap([table.placement for table in self._tables], ranks)
        self._identity = [(table.identity, table.placement, table.gradient) for table in self._tables]
        self._operations: dict[tuple[object, ...], Operation] = {}
        self._is_compared = False
        """Whether ranks have found that they begin with the same rows, where every rank has all of them."""
        none = torch.empty(0)
        self._nothing = Asked([], [], Deduped(none, none, none, none), Request(none, [[0] * len(tables)] * ranks))

    def look_up(self, begin: Callable[[], Sequence[Lookup | None]]) -> list[Tensor | None]:
        """One result for each table, or None. All ranks call this together.

        ``begin`` says what to look up in each table, None where that is nothing; it may raise.
        """
        has_grads = tuple(torch.is_grad_enabled() and table.weight.requires_grad for table in self._tables)
        operation = self._operation(has_grads)

        # Headers: how many rows each wants of each. A rank that cannot go on still sends one, and wants nothing.
        asked, failure = _exchange.attempt(lambda: self._ask(begin()), instead=self._nothing)
        wanted = [sum(counts) for counts in asked.request.counts]
        try:
            owed = _exchange.synchronize(operation, wanted, self._group, failure=failure)
        finally:
            if not self._is_compared:  # a first operation has the rows themselves in it, and is not used again
                self._operations.clear()
        self._is_compared = True
        pending = pending_of(self._group)
        number = pending.next_number()

        # Ids: which rows. They go to the owners, in the opposite direction to the rows.
        numbers = _exchange.swap("ids", asked.request.numbers, wanted, owed, operation, self._group)
        rows, counts = self._map.asked(numbers, owed)

        # Vote: to read rows may fail (deferred ones catch up first, and memory may run out). Every rank has to hear of
        # it before it waits for rows.
        read = _exchange.agree(operation.then("vote", number), lambda: self._read(rows), self._group)

        # Rows: in the order of the numbers that were sent, which is that of the keys.
        groups, lengths = self._groups(has_grads), [shape.numel() for shape in asked.shapes]
        wanted_rows = asked.request.counts
        found = self._cut(asked.found, groups, lengths, wanted_rows)
        transfer = Transfer(self._tables, groups, operation, number, wanted_rows, counts, rows, found, lengths)
        received = transfer_rows(transfer, read)
        if any(has_grads):
            pending.expect_backward(number, self._name)
        return self._finish(asked, groups, found, received)

    def _operation(self, has_grads: tuple[bool, ...]) -> Operation:
        """What ranks must have in common to look up together."""
        facts = (has_grads, *(table.weight.dtype for table in self._tables))
        if facts not in self._operations:
            words = [
                f"{table.described}, {'with' if has_grad else 'without'} gradients"
                + ("" if self._is_compared else table.contents_in_common())
                for table, has_grad in zip(self._tables, has_grads, strict=True)
            ]
            key = fingerprint(self._identity, words)
            self._operations[facts] = Operation(f"lookup of {self._name}", key, lambda: words)
        return self._operations[facts]

    def _groups(self, has_grads: Sequence[bool]) -> list[Group]:
        groups: list[Group] = []
        for number, (table, has_grad) in enumerate(zip(self._tables, has_grads, strict=True)):
            is_everywhere = table.placement.is_everywhere
            group = Group(range(number, number + 1), table.kind, table.has_bags, is_everywhere, has_grad)
            if groups and not table.has_bags and groups[-1][1:] == group[1:]:
                group = group._replace(tables=range(groups.pop().tables.start, number + 1))
            groups.append(group)
        return groups

    def _cut(
        self, found: Deduped, groups: Sequence[Group], lengths: Sequence[int], wanted: Counts
    ) -> Sequence[Deduped]:
        """What each group has of the distinct rows: those that ranks hold, rank by rank, and then those of all."""
        if len(groups) == 1:
            return [found]
        runs = [[0 if group.is_everywhere else group.count(each) for group in groups] for each in wanted]
        runs.append([group.count(wanted[0]) if group.is_everywhere else 0 for group in groups])
        return cut(found, [group.count(lengths) for group in groups], runs)

    def _ask(self, given: Sequence[Lookup | None]) -> Asked:
        refuse_torchs_ddp([table.weight for table in self._tables])
        lookups = [given[number] for number in self._order]
        none = torch.empty(0, dtype=torch.int64, device=self._tables[0].weight.device)
        ids = []
        for table, lookup in zip(self._tables, lookups, strict=True):
            with table.named_in_errors() if len(lookups) > 1 else contextlib.nullcontext():
                ids.append(none if lookup is None else lookup.check())
        positions = [table.positions(each.reshape(-1)) for table, each in zip(self._tables, ids, strict=True)]
        found = dedupe(self._map.keys(positions))
        return Asked(lookups, [each.shape for each in ids], found, self._map.ask(found.numbers))

    @torch.no_grad()  # their gradient comes with the transfer
    def _read(self, rows: list[Tensor]) -> list[Tensor]:
        return [table.read(numbers) for table, numbers in zip(self._tables, rows, strict=True)]

    def _finish(
        self, asked: Asked, groups: Sequence[Group], found: Sequence[Deduped], received: Sequence[Tensor]
    ) -> list[Tensor | None]:
        results: list[Tensor | None] = [None] * len(received)
        for group, of_group in zip(groups, found, strict=True):
            for number in group.tables:
                lookup, shape, rows = asked.lookups[number], asked.shapes[number], received[number]
                if lookup is None:
                    continue
                if lookup.reduce is None:
                    result = rows if len(shape) == 1 else rows.view(*shape, group.kind.width)
                else:
                    result = lookup.reduce(rows, of_group._replace(places=of_group.places.view(shape)))
                results[self._order[number]] = result
        return results


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

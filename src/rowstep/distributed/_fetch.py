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

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from .._torch_internals import parameters_of_ddp, running_ddp
from . import _exchange
from ._map import Counts, Deduped, JointMap, dedupe
from ._operation import Operation, fingerprint, pending_of
from ._transfer import Group, Kind, Transfer, joined, transfer_rows

if TYPE_CHECKING:
    from ._table import ShardedTable

Arguments = tuple[Any, ...]
"""What a table is looked up with: its ids, and for bags what else torch's EmbeddingBag takes."""


class Asked(NamedTuple):
    """What this rank wants, in all tables."""

    arguments: Sequence[Arguments | None]
    lengths: list[int]
    """How many ids each table has."""
    found: list[Deduped]
    """Of each group of tables, the distinct rows."""
    numbers: Tensor
    """Of the rows wanted, rank by rank, table by table."""
    counts: Counts
    """How many of each rank and table."""


class JointLookup:
    """Where tables that share a group are looked up together: always the same ones, in the same order."""

    def __init__(self, tables: Sequence[ShardedTable[Any]], name: str) -> None:
        kinds = [
            (table.placement.is_everywhere, table.has_bags, table.embedding_dim, str(table.weight.dtype))
            for table in tables
        ]
        self._order = sorted(range(len(tables)), key=kinds.__getitem__)
        """In which tables of one kind follow each other, and those that are everywhere come last."""
        self._tables = [tables[number] for number in self._order]
        self._name, self._group = name, tables[0].group
        self._map = JointMap([table.placement for table in self._tables], tables[0].ranks)
        self._identity = [(table.identity, table.placement, table.gradient) for table in self._tables]
        self._operations: dict[tuple[object, ...], Operation] = {}
        self._is_compared = False
        """Whether ranks have found that they begin with the same rows, where every rank has all of them."""

    def look_up(self, begin: Callable[[], Sequence[Arguments | None]]) -> list[Tensor | None]:
        """One result for each table, or None. All ranks call this together.

        ``begin`` says what to look up in each table, None where that is nothing; it may raise.
        """
        has_grads = tuple(torch.is_grad_enabled() and table.weight.requires_grad for table in self._tables)
        operation, groups = self._operation(has_grads), self._groups(has_grads)

        # Headers: how many rows each wants of each. A rank that cannot go on still sends one, and wants nothing.
        asked, failure = _exchange.attempt(lambda: self._ask(begin(), groups))
        wanted = [0] * self._tables[0].ranks if asked is None else [sum(counts) for counts in asked.counts]
        try:
            owed = _exchange.synchronize(operation, wanted, self._group, failure=failure)
        finally:
            if not self._is_compared:  # a first operation has the rows themselves in it, and is not used again
                self._operations.clear()
        assert asked is not None, "or its failure was raised"
        self._is_compared = True
        pending = pending_of(self._group)
        number = pending.next_number()

        # Ids: which rows. They go to the owners, in the opposite direction to the rows.
        numbers = _exchange.swap("ids", asked.numbers, wanted, owed, operation, self._group)
        rows, counts = self._map.asked(numbers, owed)

        # Vote: to read rows may fail (deferred ones catch up first, and memory may run out). Every rank has to hear of
        # it before it waits for rows.
        read = _exchange.agree(operation.then("vote", number), lambda: self._read(rows), self._group)

        # Rows: in the order of the numbers that were sent, which is that of the keys.
        transfer = Transfer(
            self._tables, groups, operation, number, asked.counts, counts, rows, asked.found, asked.lengths
        )
        received = transfer_rows(transfer, read)
        if any(has_grads):
            pending.expect_backward(number, self._name)
        results: list[Tensor | None] = [None] * len(received)
        for group, found in zip(groups, asked.found, strict=True):
            for table in group.tables:
                if (arguments := asked.arguments[table]) is not None:
                    result = self._tables[table].finish(received[table], found.places, *arguments)
                    results[self._order[table]] = result
        return results

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
            self._operations[facts] = Operation(f"lookup of {self._name}", key, words)
        return self._operations[facts]

    def _groups(self, has_grads: Sequence[bool]) -> list[Group]:
        groups: list[Group] = []
        for number, (table, has_grad) in enumerate(zip(self._tables, has_grads, strict=True)):
            kind = Kind(table.embedding_dim, table.weight.dtype)
            group = Group(range(number, number + 1), kind, table.has_bags, table.placement.is_everywhere, has_grad)
            if groups and not table.has_bags and groups[-1][1:] == group[1:]:
                group = group._replace(tables=range(groups.pop().tables.start, number + 1))
            groups.append(group)
        return groups

    def _ask(self, given: Sequence[Arguments | None], groups: Sequence[Group]) -> Asked:
        refuse_torchs_ddp([table.weight for table in self._tables])
        arguments = [given[number] for number in self._order]
        none = torch.empty(0, dtype=torch.int64, device=self._tables[0].weight.device)
        positions = []
        for table, own in zip(self._tables, arguments, strict=True):
            try:
                positions.append(table.positions(none if own is None else table.check(*own)))
            except (IndexError, RuntimeError, TypeError, ValueError) as error:
                if len(arguments) == 1:
                    raise
                raise type(error)(f"{table.label}: {error}") from error
        found: list[Deduped] = []
        parts: list[Sequence[Tensor]] = []
        counts: Counts = [[] for _ in range(self._tables[0].ranks)]
        for group in groups:
            found.append(dedupe(self._map.keys(group.tables, positions[group.tables.start : group.tables.stop])))
            numbers, of_group = self._map.ask(group.tables, found[-1].numbers)
            parts.append(numbers)
            for of_rank, more in zip(counts, of_group, strict=True):
                of_rank += more
        wanted = joined([part for of_rank in zip(*parts, strict=True) for part in of_rank])
        return Asked(arguments, [len(each) for each in positions], found, wanted, counts)

    @torch.no_grad()  # their gradient comes with the transfer
    def _read(self, rows: list[Tensor]) -> list[Tensor]:
        return [table.read(numbers) for table, numbers in zip(self._tables, rows, strict=True)]


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

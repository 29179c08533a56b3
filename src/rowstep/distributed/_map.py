"""Several tables as one: where each row of each of them is, in one count over all.

    key      of a row: the tables' positions, one table after the other. Distinct keys in order are distinct rows, table
             by table, block by block
    number   of a row on a rank that holds it: room for every table's block, one table after the other

Both are found for all tables at once, so a lookup in many small tables sorts once, and sends once.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ._dedupe import Deduped
from ._placement import Placement

Counts = list[list[int]]
"""Of rows: by rank, then by table."""


class Request(NamedTuple):
    """What a rank wants of the others."""

    numbers: Tensor
    """Of the rows wanted, rank by rank, table by table."""
    counts: Counts
    """How many of each rank and table."""


class JointMap:
    """Where the rows of these tables are."""

    def __init__(self, placements: Sequence[Placement], ranks: int) -> None:
        self.tables, self.ranks = len(placements), ranks
        self.first_keys = list(itertools.accumulate((placement.rows for placement in placements), initial=0))
        self._starts = list(itertools.accumulate((placement.span for placement in placements), initial=0))
        self.key_dtype = torch.int32 if self.first_keys[-1] < 2**31 else torch.int64  # sorts 1.4x faster
        self.number_dtype = torch.int32 if self._starts[-1] < 2**31 else torch.int64
        blocks = [
            (table, self.first_keys[table] + first, holders)
            for table, placement in enumerate(placements)
            for first, holders in placement.blocks()
        ]
        self._first_keys_of_blocks = torch.tensor([first for _, first, _ in blocks], dtype=self.key_dtype)
        self._shifts = [first - self._starts[table] for table, first, _ in blocks]
        self._held: list[list[tuple[int, int]]] = [
            [(table, block) for block, (table, _, holders) in enumerate(blocks) if rank in holders]
            for rank in range(ranks)
        ]
        """By rank: the blocks that it holds, each with its table."""
        self._is_in_order = [block for held in self._held for _, block in held] == [*range(len(blocks))]

    def ask(self, keys: Tensor) -> Request:
        """For the rows of these keys, which are distinct and ascending: which numbers to send to which rank."""
        firsts = self._first_keys_of_blocks.to(keys.device)
        sizes = _between(torch.searchsorted(keys, firsts).tolist(), len(keys))
        counts = [[0] * self.tables for _ in range(self.ranks)]
        for rank, held in enumerate(self._held):
            for table, block in held:
                counts[rank][table] = sizes[block]
        numbers = (keys - _repeated(self._shifts, sizes, keys)).to(self.number_dtype)
        if not self._is_in_order:
            blocks = torch.split(numbers, sizes)
            numbers = torch.cat([blocks[block] for held in self._held for _, block in held])
        return Request(numbers, counts)

    def asked(self, numbers: Tensor, lengths: list[int]) -> tuple[list[Tensor], Counts]:
        """Of numbers that each rank has asked for: the rows of each table here, and how many each rank wants of it."""
        if self.tables == 1:
            return [numbers.to(torch.int64)], [[length] for length in lengths]
        rows, room = numbers.to(torch.int64), self._starts[-1]
        # A rank's numbers ascend, and so do those of all ranks if each has room for itself.
        ascending = rows + _repeated([rank * room for rank in range(self.ranks)], lengths, rows)
        firsts = [rank * room + start for rank in range(self.ranks) for start in self._starts[:-1]]
        sizes = _between(torch.searchsorted(ascending, torch.tensor(firsts, device=rows.device)).tolist(), len(rows))
        rows -= _repeated(self._starts[:-1] * self.ranks, sizes, rows)
        counts = [sizes[rank * self.tables : (rank + 1) * self.tables] for rank in range(self.ranks)]
        parts = torch.split(rows, sizes)
        by_table = torch.cat([part for table in range(self.tables) for part in parts[table :: self.tables]])
        return list(torch.split(by_table, [sum(each) for each in zip(*counts, strict=True)])), counts

    def cut(self, found: Deduped, lengths: Sequence[int], groups: Sequence[range]) -> list[Deduped]:
        """Of distinct keys, and of so many ids of each table that had them: what each group of tables has of both."""
        if len(groups) == 1:
            return [found]
        firsts = torch.tensor([self.first_keys[group.start] for group in groups], device=found.numbers.device)
        sizes = _between(torch.searchsorted(found.numbers, firsts.to(found.numbers.dtype)).tolist(), len(found.numbers))
        ids = [sum(lengths[group.start : group.stop]) for group in groups]
        ids_before, keys_before = ([0, *itertools.accumulate(each[:-1])] for each in (ids, sizes))
        shifted = (
            (found.numbers, sizes),
            (found.places.view(-1) - _repeated(keys_before, ids, found.places), ids),
            (found.occurrences - _repeated(ids_before, ids, found.occurrences), ids),
            (found.starts - _repeated(ids_before, sizes, found.starts), sizes),
        )
        return [Deduped(*of_group) for of_group in zip(*(torch.split(*each) for each in shifted), strict=True)]


def _between(starts: list[int], end: int) -> list[int]:
    return [after - before for before, after in itertools.pairwise([*starts, end])]


def _repeated(values: list[int], counts: list[int], like: Tensor) -> Tensor:
    """Each value so many times. By NumPy: 20 us for 53,248 numbers, of which torch's repeat_interleave takes 140."""
    return torch.from_numpy(np.repeat(np.array(values), counts)).to(like)

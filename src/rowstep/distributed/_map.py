"""Several tables as one: which row each id needs of which rank, without duplicates.

    number   of a row on a rank that holds it: room for every table's block, one table after the other
    key      of a row: the rank that holds it, times the room of a rank, and its number there

Distinct keys in order are rows in the order in which they are asked for, sent, and summed: rank by rank, and table by
table. Of a table that is everywhere, every rank holds every row: keys are numbers, and every rank is asked for them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  # as torch's own documents have it

from ._placement import Placement

Counts = list[list[int]]
"""Of rows: by rank, then by table."""


class Deduped(NamedTuple):
    """The distinct ones of some numbers, ascending, and where each of them occurs."""

    numbers: Tensor
    places: Tensor
    """For each number given, which of the distinct ones it is."""
    occurrences: Tensor
    """Where the numbers given are, one distinct number after the other, in order of occurrence."""
    starts: Tensor
    """Where in ``occurrences`` each distinct number begins."""


def dedupe(numbers: Tensor) -> Deduped:
    """Find duplicates by a stable sort, which also says in what order to sum."""
    ordered, occurrences = torch.sort(numbers, stable=True)
    found, ranks, counts = torch.unique_consecutive(ordered, return_inverse=True, return_counts=True)
    places = torch.empty_like(occurrences)
    places[occurrences] = ranks
    return Deduped(found, places, occurrences, counts.cumsum(0) - counts)


def sum_duplicates(values: Tensor, of: Deduped) -> Tensor:
    """One row of ``values`` for each distinct number: the sum of those at its places, in order of occurrence."""
    if values.dtype == torch.float64:  # of which torch's embedding_bag has no fast kernel: 14.9 ms below
        sums = values.new_zeros(len(of.numbers), *values.shape[1:])
        return sums.index_add_(0, of.places, values)
    # 65,536 Zipf ids of width 64, one thread: 0.9 ms, where index_add_ takes 4.6 and coalesce, sorting included, 27.
    return F.embedding_bag(of.occurrences, values, of.starts, mode="sum")


class JointMap:
    """Where the rows of these tables are."""

    def __init__(self, placements: Sequence[Placement], ranks: int) -> None:
        self._placements, self._ranks = placements, ranks
        self._starts = list(itertools.accumulate((placement.span for placement in placements), initial=0))
        self._room = self._starts.pop()
        self._key_dtype = torch.int32 if ranks * self._room < 2**31 else torch.int64  # sorts 1.4x faster
        self._number_dtype = torch.int32 if self._room < 2**31 else torch.int64

    def keys(self, tables: range, positions: Sequence[Tensor]) -> Tensor:
        """Of rows of some tables, by their positions in each."""
        joint = positions[0] if len(positions) == 1 else torch.cat(list(positions))
        lengths = [len(each) for each in positions]
        keys = joint + _repeated([self._starts[table] for table in tables], lengths, joint)
        if self._ranks > 1:
            # Position block * rank + row becomes room * rank + row. Of a table that is everywhere there is one block.
            blocks = _repeated([self._placements[table].span for table in tables], lengths, joint)
            keys += (joint // blocks) * (self._room - blocks)
        return keys.to(self._key_dtype)

    def ask(self, tables: range, keys: Tensor) -> tuple[Sequence[Tensor], Counts]:
        """For the rows of these keys, which are distinct and ascending: what to ask each rank for, and how many.

        The tables are all divided, or all everywhere.
        """
        holders = 1 if self._placements[tables.start].is_everywhere else self._ranks
        firsts = [rank * self._room + self._starts[table] for rank in range(holders) for table in tables]
        sizes = _sizes(keys, firsts)
        counts = [sizes[rank * len(tables) : (rank + 1) * len(tables)] for rank in range(holders)]
        numbers = (keys % self._room if holders > 1 else keys).to(self._number_dtype)
        parts = torch.split(numbers, [sum(each) for each in counts])
        return (parts, counts) if holders == self._ranks else (parts * self._ranks, counts * self._ranks)

    def asked(self, numbers: Tensor, lengths: list[int]) -> tuple[list[Tensor], Counts]:
        """Of numbers that each rank has asked for: the rows of each table here, and how many each rank wants of it."""
        tables, rows = len(self._starts), numbers.to(torch.int64)
        if tables == 1:
            return [rows], [[length] for length in lengths]
        # A rank's numbers ascend, and so do those of all ranks if each has room for itself.
        ascending = rows + _repeated([rank * self._room for rank in range(self._ranks)], lengths, rows)
        sizes = _sizes(ascending, [rank * self._room + start for rank in range(self._ranks) for start in self._starts])
        rows -= _repeated(self._starts * self._ranks, sizes, rows)
        counts = [sizes[rank * tables : (rank + 1) * tables] for rank in range(self._ranks)]
        parts = torch.split(rows, sizes)
        by_table = torch.cat([part for table in range(tables) for part in parts[table::tables]])
        return list(torch.split(by_table, [sum(each) for each in zip(*counts, strict=True)])), counts


def _sizes(ascending: Tensor, firsts: list[int]) -> list[int]:
    """How many numbers there are from each of the ``firsts`` up to the next."""
    if len(firsts) == 1:
        return [len(ascending)]
    bounds = torch.tensor(firsts, dtype=ascending.dtype, device=ascending.device)
    starts = [*torch.searchsorted(ascending, bounds).tolist(), len(ascending)]
    return [after - before for before, after in itertools.pairwise(starts)]


def _repeated(values: list[int], counts: Sequence[int], like: Tensor) -> Tensor | int:
    """Each value so many times. By NumPy: 20 us for 53,248 numbers, of which torch's repeat_interleave takes 140."""
    if len(values) == 1:
        return values[0]
    return torch.from_numpy(np.repeat(np.array(values), counts)).to(like)

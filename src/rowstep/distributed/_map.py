"""Several tables as one: where each row of each of them is, in one count over all.

    number   of a row on a rank that holds it: room for every table's block, one table after the other
    key      of a row: the rank that holds it, and its number there. What every rank holds comes last

Distinct keys in order are rows in the order in which they are asked for, sent, and summed: rank by rank, and table by
table. Both are found for all tables at once, so a lookup in many small tables sorts once, and sends once.
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
    """Where the rows of these tables are. Those that are everywhere have to come last."""

    def __init__(self, placements: Sequence[Placement], ranks: int) -> None:
        self.ranks, self.tables = ranks, len(placements)
        self._placed = sum(not placement.is_everywhere for placement in placements)
        """How many tables are not everywhere."""
        self._starts = list(itertools.accumulate((placement.span for placement in placements), initial=0))
        room = self._starts[self._placed]
        """For the tables that are not everywhere, on each rank."""
        last = ranks * room + self._starts[-1] - room
        self._key_dtype = torch.int32 if last < 2**31 else torch.int64  # sorts 1.4x faster
        self._number_dtype = torch.int32 if self._starts[-1] < 2**31 else torch.int64
        # A key is position + position // block * (room - block) + offset: of a table everywhere there is one block.
        self._blocks = [placement.span for placement in placements]
        self._offsets = [
            start + (ranks - 1) * room * placement.is_everywhere
            for start, placement in zip(self._starts, placements, strict=False)
        ]
        self._room = room
        firsts = [rank * room + start for rank in range(ranks) for start in self._starts[: self._placed]]
        firsts += [(ranks - 1) * room + start for start in self._starts[self._placed : -1]]
        self._first_keys = torch.tensor(firsts, dtype=self._key_dtype)

    def keys(self, positions: Sequence[Tensor]) -> Tensor:
        """Of rows by their positions in each table."""
        joint, lengths = torch.cat(list(positions)), [len(each) for each in positions]
        keys = joint + _repeated(self._offsets, lengths, joint)
        if self._placed and self.ranks > 1:
            blocks = _repeated(self._blocks, lengths, joint)
            keys += (joint // blocks) * (self._room - blocks)
        return keys.to(self._key_dtype)

    def ask(self, keys: Tensor) -> Request:
        """For the rows of these keys, which are distinct and ascending: which numbers to send to which rank."""
        sizes = _between(torch.searchsorted(keys, self._first_keys.to(keys.device)).tolist(), len(keys))
        everywhere = sizes[self.ranks * self._placed :]
        counts = [[*sizes[rank * self._placed : (rank + 1) * self._placed], *everywhere] for rank in range(self.ranks)]
        of_ranks = [sum(each[: self._placed]) for each in counts]
        shifts = [*(rank * self._room for rank in range(self.ranks)), (self.ranks - 1) * self._room]
        numbers = (keys - _repeated(shifts, [*of_ranks, sum(everywhere)], keys)).to(self._number_dtype)
        if everywhere and self.ranks > 1:
            *parts, for_all = torch.split(numbers, [*of_ranks, sum(everywhere)])
            numbers = torch.cat([each for part in parts for each in (part, for_all)])
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


def cut(found: Deduped, ids: Sequence[int], sizes: Sequence[Sequence[int]]) -> list[Deduped]:
    """What each of several groups of tables has of distinct rows.

    A group has so many ids, one group after the other, and so many rows in each run of ``sizes`` (a rank's, or
    everybody's): runs follow each other, and groups in a run.
    """
    groups, runs = len(ids), [size for run in sizes for size in run]
    before = list(itertools.accumulate(runs, initial=0))
    within = [sum(run[group] for run in sizes[:number]) for number in range(len(sizes)) for group in range(groups)]
    shifts = [first - own for first, own in zip(before, within, strict=False)]
    device = found.numbers.device
    local = torch.arange(len(found.numbers), device=device) - _repeated(shifts, runs, found.occurrences)
    places = torch.split(local[found.places.view(-1)], list(ids))
    ends = torch.cat([found.starts, torch.tensor([len(found.occurrences)], device=device)])
    occurring = torch.split(found.occurrences, _between(ends[before[:-1]].tolist(), len(found.occurrences)))
    numbers, counts = torch.split(found.numbers, runs), torch.split(ends.diff(), runs)
    parts = []
    for group, ids_before in enumerate(itertools.accumulate(ids[:-1], initial=0)):
        repeats = torch.cat(counts[group::groups])
        occurrences = torch.cat(occurring[group::groups]) - ids_before
        parts.append(
            Deduped(torch.cat(numbers[group::groups]), places[group], occurrences, repeats.cumsum(0) - repeats)
        )
    return parts


def _between(starts: list[int], end: int) -> list[int]:
    return [after - before for before, after in itertools.pairwise([*starts, end])]


def _repeated(values: list[int], counts: Sequence[int], like: Tensor) -> Tensor:
    """Each value so many times. By NumPy: 20 us for 53,248 numbers, of which torch's repeat_interleave takes 140."""
    if len(values) == 1:
        return torch.tensor(values, dtype=like.dtype, device=like.device)
    return torch.from_numpy(np.repeat(np.array(values), counts)).to(like)

"""How many threads a launch is worth, by how long launches like it have taken.

A launch ends when the last of its threads does, and where other processes keep the cores busy, a thread may wait
milliseconds for one: beside one busy process per core, a step of 0.5 ms took 7 on two threads. Nobody tells us what
else runs, so it is measured. Results have the same bits for any number of threads.
"""

from __future__ import annotations

_FIRST_PAUSE, _LONGEST_PAUSE = 16, 512


class Pace:
    """The launches of one kernel and about one size."""

    __slots__ = ("_alone", "_launches", "_pause", "_since", "_together", "_wait")

    def __init__(self) -> None:
        self._launches = self._since = self._wait = 0
        """All; those on several threads since one was last not worth it; those on one thread until several are tried
        again."""
        self._pause = _FIRST_PAUSE
        self._alone = self._together = 0.0
        """How many seconds one thread takes and how many several take, on average; 0 if not known."""

    def threads(self, most: int) -> int:
        """On how many threads the next launch should run."""
        self._launches += 1
        if self._wait:
            self._wait -= 1
            return 1
        # The first launches are on several threads and on one by turns.
        return 1 if self._launches in (2, 4, 6) else most

    def took(self, threads: int, seconds: float) -> None:
        """Learn how long a launch took."""
        if self._launches == 1:
            return  # it may have compiled
        if threads == 1:
            # One that was interrupted says little about the others.
            self._alone += (min(seconds, 2 * self._alone) - self._alone) / 8 if self._alone else seconds
            return
        if self._together:
            # One that waited for a core says little; two soon after each other say enough. With a weight of a quarter,
            # threads that were late once in a hundred launches were given up for half of the others.
            self._together += (min(seconds, 3 * self._alone) - self._together) / 8
        else:
            self._together = seconds
        self._since += 1
        if self._alone and self._together > self._alone:
            self._wait, self._since, self._together = self._pause, 0, 0.0
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        elif self._since > self._pause:
            self._pause = _FIRST_PAUSE

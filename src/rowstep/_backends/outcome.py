"""How an update ended, for a caller that was interrupted and has to know.

Ctrl-C strikes between any two instructions of Python, most likely right after a kernel that took its time: the rows
have moved, and nobody was told. So the kernel itself writes down what it did, in memory that outlives the interrupt.
"""

from __future__ import annotations

from typing import Any

import numpy as np


class Outcome:
    """Whether an update came to its end, and how many rows it left out."""

    __slots__ = ("_skipped",)

    def __init__(self) -> None:
        self._skipped: Any = None

    def watch(self, skipped: Any) -> None:
        """Look from now on at what each part of the update writes here when it has ended: how many rows it skipped.

        Until then there are negative numbers.
        """
        self._skipped = skipped

    def complete(self, skipped: int = 0) -> None:
        """Note that the update has ended."""
        self._skipped = np.array([skipped])

    @property
    def is_complete(self) -> bool:
        """Whether every row was updated. If not, none was."""
        return self._skipped is not None and min(self._skipped.tolist()) >= 0

    @property
    def skipped(self) -> int:
        """How many rows were left out, of a complete update."""
        return int(sum(self._skipped.tolist()))

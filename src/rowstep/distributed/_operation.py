"""What a rank is about to run, which all ranks must agree on, and which backward passes it still owes the others.

A rank that leaves a lookup out of its loss makes no backward pass of it, and the others wait for its part. So every
lookup has a number, the same on all ranks, and is open until its backward pass begins. Ranks that are about
to run different operations raise; and before a step with open lookups, ranks synchronize too. Where all ranks leave out
the same ones, nothing is wrong.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field

from torch.distributed import ProcessGroup

_BYTES = 7  # of a key: it travels in a signed word of 64 bits, with a bit of news beside it
_MOST_OPEN = 64


def fingerprint(*facts: object) -> int:
    """A number that ranks have in common if these facts are the same: plain values, whose text is the same too."""
    return int.from_bytes(hashlib.blake2b(repr(facts).encode(), digest_size=_BYTES).digest(), "little")


class Operation:
    """What a rank is about to run. It is the same on other ranks if ``key`` is the same."""

    __slots__ = ("_details", "key", "text")

    def __init__(self, text: str, key: int | None = None, details: Callable[[], list[str]] = list) -> None:
        self.text, self._details = text, details
        self.key = fingerprint(text) if key is None else key

    @property
    def details(self) -> list[str]:
        """What else there is to say if ranks are at odds."""
        return self._details()

    def then(self, what: str, number: int) -> Operation:
        """What follows from this one in the lookup of this number."""
        return Operation(f"{what} of the {self.text}", fingerprint(self.key, what, number), self._details)


@dataclass
class PendingBackward:
    """The lookups of a group."""

    count: int = 0
    open: dict[int, str] = field(default_factory=dict)
    """Those that had a backward pass ahead of them, by number, and which tables they were of."""

    def next_number(self) -> int:
        self.count += 1
        return self.count

    def expect_backward(self, number: int, tables: str) -> None:
        self.open[number] = tables
        if len(self.open) > _MOST_OPEN:  # a program that never runs backward passes
            del self.open[min(self.open)]

    def begin_backward(self, number: int) -> None:
        self.open.pop(number, None)

    @property
    def in_words(self) -> str:
        tables = list(dict.fromkeys(self.open.values()))
        return f"no backward pass of the last lookup of {', '.join(tables)}" if tables else ""


_pending: MutableMapping[ProcessGroup, PendingBackward] = weakref.WeakKeyDictionary()


def pending_of(group: ProcessGroup | None) -> PendingBackward:
    """The lookups of this group; for a process on its own, one that is forgotten."""
    if group is None:
        return PendingBackward()
    return _pending.setdefault(group, PendingBackward())

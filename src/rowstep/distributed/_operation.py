"""What ranks must agree on: which table this is, what each is about to run, and which backward passes have not run yet.

Tables of a group are numbered as they are made, which every rank does in the same order. A copy has its original's
number and one of its own, so a copy that only some ranks make does not shift the numbers of tables made later.

A rank that leaves a lookup out of its loss makes no backward pass of it, and the others wait for its part. So every
lookup has a number, the same on all ranks, and is open until its backward pass begins. Ranks that are about
to run different operations raise; and before a step with open lookups, ranks synchronize too. Where all ranks leave out
the same ones, nothing is wrong.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field

from torch.distributed import ProcessGroup

_BYTES = 7  # of a key: it is sent in a signed word of 64 bits, with a bit that says whether this rank has failed
_MOST_OPEN = 64

Identity = tuple[int, ...]
"""The number of a table; then, for a copy, its number among the copies of that; and so on."""

_made: MutableMapping[ProcessGroup, dict[Identity, int]] = weakref.WeakKeyDictionary()


def new_identity(group: ProcessGroup | None, original: Identity = ()) -> Identity:
    """Table id, identical on all ranks: of a new table, or of a copy of the ``original``."""
    if group is None:
        return (*original, 0)
    made = _made.setdefault(group, {})
    made[original] = made.get(original, 0) + 1
    return (*original, made[original])


def fingerprint(*facts: object) -> int:
    """A number that ranks have in common if these facts are the same: plain values, whose text is the same too."""
    return int.from_bytes(hashlib.blake2b(repr(facts).encode(), digest_size=_BYTES).digest(), "little")


class Operation:
    """What a rank is about to run. It is the same on other ranks if ``key`` is the same."""

    def __init__(self, text: str, key: int | None = None, details: Sequence[str] = ()) -> None:
        self.text, self.key = text, fingerprint(text) if key is None else key
        self.details = details
        """What else there is to say if ranks are at odds."""

    def then(self, what: str, number: int) -> Operation:
        """What follows from this one in the lookup of this number."""
        return Operation(f"{what} of the {self.text}", fingerprint(self.key, what, number), self.details)


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

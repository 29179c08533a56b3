"""How much this rank sends: counted at every collective."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(eq=False)  # blocks that count may lie within each other: each is found by what it is
class Traffic:
    """Bytes that this rank has sent to other ranks, and collectives that it took part in, by kind of message.

    ``count_traffic`` makes one.

    Args:
        sent: bytes, by kind of message.
        collectives: how many, by kind of message.
    """

    sent: dict[str, int] = field(default_factory=dict)
    collectives: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Bytes of all kinds together."""
        return sum(self.sent.values())


_counting: list[Traffic] = []


@contextlib.contextmanager
def count_traffic() -> Iterator[Traffic]:
    """Count the bytes that this rank's collectives send inside the block, and the collectives.

    Yields:
        A ``Traffic`` that grows as messages are sent.
    """
    traffic = Traffic()
    _counting.append(traffic)
    try:
        yield traffic
    finally:
        _counting.remove(traffic)


def count(kind: str, sent: int) -> None:
    """Note a collective that sends this many bytes to other ranks."""
    for traffic in _counting:
        traffic.sent[kind] = traffic.sent.get(kind, 0) + sent
        traffic.collectives[kind] = traffic.collectives.get(kind, 0) + 1

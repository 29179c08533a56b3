"""Who is alive at the same time: tables of 10 million rows do not fit for all peers at once."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from benchmarks.peers.catalogue import Peer

SHARE = 0.75  # of the free memory; the rest is for copies while tables are made, and for the system
WITHOUT_A_WORD = 8e9  # bytes taken for free where the system does not tell


def groups(peers: Iterable[Peer], first: Peer, weights: int, free: float) -> list[list[Peer]]:
    """Peers in the order given, each group with `first` before them: all ratios are to that one, in the same group.

    A peer that fits with nobody but `first` still gets a group: it may fail, and its failure is then reported.
    """
    made: list[list[Peer]] = []
    for peer in peers:
        if not made or weights * sum(other.bytes_per_weight for other in [*made[-1], peer]) > SHARE * free:
            made.append([first])
        made[-1].append(peer)
    return made


def free_bytes() -> float:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return WITHOUT_A_WORD
    found = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return 1024.0 * int(next(found, WITHOUT_A_WORD / 1024))

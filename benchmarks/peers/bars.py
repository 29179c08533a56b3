"""What rowstep is to reach beside its peers. Only what was measured is listed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.bars import Bar, faster
from benchmarks.cases import UNIFORM, ZIPF
from benchmarks.peers.catalogue import FBGEMM_LOOP, ROWSTEP, ROWSTEP_LOOP, STEPS, Rule
from benchmarks.timing import Measurement

SAME_RULE = tuple(peer.name for peer in STEPS if peer.rule is Rule.LAZY and peer is not ROWSTEP)
FASTER = 1.0  # than every peer with the same rule
FASTER_THAN_BEST = 2.0  # at 1M x 64, with one thread
LOOP = 1.5  # than FBGEMM's row-wise Adagrad


def reached(measurements: Sequence[Measurement]) -> Iterator[Bar]:
    for measured in measurements:
        if measured.kind == "step":
            for peer in SAME_RULE:
                yield from faster(f"step vs {peer}", measured, ROWSTEP.name, peer, FASTER)
            yield from _best(measured)
        if measured.kind == "loop":
            yield from faster(f"whole loop vs {FBGEMM_LOOP.name}", measured, ROWSTEP_LOOP.name, FBGEMM_LOOP.name, LOOP)


def _best(measured: Measurement) -> Iterator[Bar]:
    beside = [peer for peer in SAME_RULE if peer in measured.timings]
    if beside and measured.threads == 1 and measured.name in (ZIPF.name, UNIFORM.name):
        best = min(beside, key=lambda peer: measured.timings[peer].median)
        yield from faster(f"step vs the best of them, {best}", measured, ROWSTEP.name, best, FASTER_THAN_BEST)

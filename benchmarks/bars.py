"""What rowstep is to reach, and whether this run reached it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.timing import Measurement


@dataclass(frozen=True)
class Bar:
    measure: str
    limit: float
    reached: float
    unit: str
    at_least: bool = False
    disturbed: bool = False  # other work took part of the machine: neither met nor missed

    @property
    def met(self) -> bool:
        return self.reached >= self.limit if self.at_least else self.reached <= self.limit


def faster(what: str, measured: Measurement, ours: str, theirs: str, at_least: float) -> Iterator[Bar]:
    """`ours` is to be so many times faster; nothing if one of them did not take part."""
    yield from _ratio(what, measured, theirs, ours, at_least, is_least=True)


def not_much_slower(what: str, measured: Measurement, ours: str, theirs: str, at_most: float) -> Iterator[Bar]:
    """`ours` may take so many times as long; nothing if one of them did not take part."""
    yield from _ratio(what, measured, ours, theirs, at_most, is_least=False)


def _ratio(what: str, measured: Measurement, slow: str, fast: str, limit: float, *, is_least: bool) -> Iterator[Bar]:
    ratio = measured.ratio(slow, fast)
    if ratio is not None:
        where = f"{measured.about}, {measured.threads} thread{'s' * (measured.threads > 1)}"
        yield Bar(f"{what}: {where}", limit, ratio, "x", is_least, measured.disturbed)

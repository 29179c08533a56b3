"""What rowstep is to reach, and whether this run reached it. Only what was measured is listed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rowstep.cli._bench import cases
from rowstep.cli._bench.contenders import ADAM, ROOFLINE, ROWSTEP, TORCH
from rowstep.cli._bench.load import BUSY
from rowstep.cli._bench.results import Results
from rowstep.cli._bench.timing import Measurement

# How many times faster than torch.optim.SparseAdam: with one thread, with more.
STEP = {
    cases.ZIPF.name: (6, 8),
    cases.UNIFORM.name: (7, 9),
    cases.LONG.name: (6, 6),
    cases.SMALL.name: (6, 6),
    cases.MANY.name: (5, 5),
}
LOOP = 3
OVER_ROOFLINE = 1.4
TEN_TIMES_THE_ROWS = 1.5
OVER_DENSE_ADAM = 1.1
PEAK_BYTES_PER_ID = 64
FIRST_STEP_COLD, FIRST_STEP_CACHED = 6, 1  # seconds


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


def bars(results: Results) -> list[Bar]:
    if results.quick:
        return []
    return [*(bar for measured in results.measurements for bar in _timed(measured)), *_fresh(results)]


def _timed(measured: Measurement) -> Iterator[Bar]:
    busy = measured.disturbed
    where = f"{measured.about}, {measured.threads} thread{'s' * (measured.threads > 1)}"
    versus_torch = measured.ratio(TORCH, ROWSTEP)
    if measured.kind == "step" and versus_torch:
        limit = STEP[measured.name][measured.threads > 1]
        yield Bar(f"step vs torch SparseAdam: {where}", limit, versus_torch, "x", at_least=True, disturbed=busy)
    if measured.kind == "loop" and versus_torch:
        yield Bar(f"whole loop vs torch SparseAdam: {where}", LOOP, versus_torch, "x", at_least=True, disturbed=busy)
    versus_roofline = measured.ratio(ROWSTEP, ROOFLINE)
    if measured.name == cases.UNIFORM.name and measured.threads == 1 and versus_roofline:
        yield Bar(f"step over roofline: {where}", OVER_ROOFLINE, versus_roofline, "x", disturbed=busy)
    versus_adam = measured.ratio(ROWSTEP, ADAM)
    if measured.kind == "dense" and versus_adam:
        yield Bar(f"step over Adam(fused): {where}", OVER_DENSE_ADAM, versus_adam, "x", disturbed=busy)
    if measured.kind == "scaling":
        few, many = measured.timings
        growth = measured.ratio(many, few)
        assert growth is not None
        yield Bar(f"time with more rows: {where}", TEN_TIMES_THE_ROWS, growth, "x", disturbed=busy)


def _fresh(results: Results) -> Iterator[Bar]:
    if results.memory:
        worst = max(peak.rowstep for peak in results.memory)
        yield Bar("peak extra memory of a step, per id", PEAK_BYTES_PER_ID, worst, " B")
    if results.first_step:
        cold, cached = results.first_step.cold, results.first_step.cached
        busy = results.first_step.others > BUSY
        yield Bar("first step, nothing cached", FIRST_STEP_COLD, cold, " s", disturbed=busy)
        yield Bar("first step, kernels cached", FIRST_STEP_CACHED, cached, " s", disturbed=busy)

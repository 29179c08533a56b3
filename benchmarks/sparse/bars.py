"""What SparseAdam is to reach. Only what was measured is listed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks import cases
from benchmarks.bars import Bar, faster, not_much_slower
from benchmarks.contenders import ADAM, ROOFLINE, ROWSTEP, TORCH
from benchmarks.load import BUSY
from benchmarks.sparse.fresh import FirstStep, PeakMemory
from benchmarks.timing import Measurement

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


def timed(measured: Measurement) -> Iterator[Bar]:
    if measured.kind == "step":
        limit = STEP[measured.name][measured.threads > 1]
        yield from faster("step vs torch SparseAdam", measured, ROWSTEP, TORCH, limit)
        if measured.name == cases.UNIFORM.name and measured.threads == 1:
            yield from not_much_slower("step over roofline", measured, ROWSTEP, ROOFLINE, OVER_ROOFLINE)
    if measured.kind == "loop":
        yield from faster("whole loop vs torch SparseAdam", measured, ROWSTEP, TORCH, LOOP)
    if measured.kind == "dense":
        yield from not_much_slower("step over Adam(fused)", measured, ROWSTEP, ADAM, OVER_DENSE_ADAM)
    if measured.kind == "scaling":
        few, many = measured.timings
        yield from not_much_slower("time with more rows", measured, many, few, TEN_TIMES_THE_ROWS)


def fresh(memory: Sequence[PeakMemory], first_step: FirstStep | None) -> Iterator[Bar]:
    if memory:
        worst = max(peak.rowstep for peak in memory)
        yield Bar("peak extra memory of a step, per id", PEAK_BYTES_PER_ID, worst, " B")
    if first_step:
        busy = first_step.others > BUSY
        yield Bar("first step, nothing cached", FIRST_STEP_COLD, first_step.cold, " s", disturbed=busy)
        yield Bar("first step, kernels cached", FIRST_STEP_CACHED, first_step.cached, " s", disturbed=busy)

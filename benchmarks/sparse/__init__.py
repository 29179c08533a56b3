"""The suite `sparse`: rowstep.SparseAdam against torch's optimizers and against the memory itself."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from benchmarks.bars import Bar
from benchmarks.cases import Case
from benchmarks.sparse import bars, fresh, measures, plot, report
from benchmarks.sparse.sizes import FULL, QUICK, Sizes
from benchmarks.suite import Part, Suite

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console


class SparseSuite(Suite):
    file = "bench"

    state_bytes_per_weight: float | None = None
    first_step: fresh.FirstStep | None = None
    memory: tuple[fresh.PeakMemory, ...] = ()

    @property
    def sizes(self) -> Sizes:
        return QUICK if self.quick else FULL

    def parts(self) -> Iterator[Part]:
        yield Part("first-step", self._first_step)
        yield Part("memory", self._memory)
        for case in self.sizes.steps:
            yield Part(case.name, functools.partial(self._steps, case))
        yield Part("scaling", self._scaling)
        yield Part("loop", self._loop)
        yield Part("dense", self._dense)

    def _first_step(self) -> None:
        self.first_step = fresh.first_step()

    def _memory(self) -> None:
        self.memory = tuple(fresh.peak_memory(self.sizes.memory_rows, self.sizes.memory_ids))

    def _steps(self, case: Case) -> None:
        for measured, state in measures.steps(case, self.threads, self.repeats):
            self.measurements.append(measured)
            self.state_bytes_per_weight = state

    def _scaling(self) -> None:
        self.measurements += measures.scaling(*self.sizes.scaling, self.threads, self.repeats)

    def _loop(self) -> None:
        self.measurements += [measures.loop(case, max(self.threads), self.repeats) for case in self.sizes.loops]

    def _dense(self) -> None:
        self.measurements += measures.dense(self.sizes.dense_rows, max(self.threads), self.repeats)

    def bars(self) -> Iterator[Bar]:
        for measured in self.measurements:
            yield from bars.timed(measured)
        yield from bars.fresh(self.memory, self.first_step)

    def show(self, console: Console) -> None:
        if steps := self.of_kind("step"):
            console.print(report.steps(steps))
        if self.state_bytes_per_weight is not None:
            console.print(f"State kept by rowstep: {self.state_bytes_per_weight:.2f} bytes per weight.")
        if others := self.of_kind(*report.OTHER_KINDS):
            console.print(report.others(others))
        if self.memory:
            console.print(report.memory(self.memory))
        if self.first_step:
            cold, cached = self.first_step.cold, self.first_step.cached
            console.print(
                f"First step of a fresh interpreter: {cold:.2f} s, and {cached:.2f} s with the kernels cached."
            )

    def draw(self, figure: Figure) -> bool:
        steps = self.of_kind("step")
        if steps:
            plot.draw_steps(figure, steps)
        return bool(steps)

    def findings(self) -> dict[str, Any]:
        return {
            "state_bytes_per_weight": self.state_bytes_per_weight,
            "first_step_seconds": asdict(self.first_step) if self.first_step else None,
            "peak_memory_bytes_per_id": [asdict(peak) for peak in self.memory],
        }

"""The suite `memory`: one step of SparseAdam with every kind of state, side by side, and the bytes that each keeps."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch import Tensor

from benchmarks import cases
from benchmarks.bars import Bar, not_much_slower
from benchmarks.cases import Case
from benchmarks.contenders import check_close, give, stepper, weights
from benchmarks.memory.kinds import FLOAT32, KINDS
from benchmarks.report import times
from benchmarks.suite import Part, Suite
from benchmarks.timing import measure, threads
from rowstep import SparseAdam

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console

_FULL = (cases.UNIFORM, cases.ZIPF)
_QUICK = (Case("uniform-20k", 20_000, 64, 4_096), Case("zipf-20k", 20_000, 64, 4_096, zipf=True))
_SMALL = Case("agreement", 300, 16, 200)


class MemorySuite(Suite):
    file = "memory"

    bytes_per_weight: Mapping[str, float] = MappingProxyType({})

    def parts(self) -> Iterator[Part]:
        yield Part("agreement", _check_agreement)
        for case in _QUICK if self.quick else _FULL:
            yield Part(case.name, functools.partial(self._steps, case))

    def _steps(self, case: Case) -> None:
        optimizers = {name: SparseAdam(cases.parameters(case), **kind.options) for name, kind in KINDS.items()}
        pool = cases.gradients(case)
        lineup = [stepper(name, optimizer, pool) for name, optimizer in optimizers.items()]
        for count in self.threads:
            with threads(count):
                self.measurements.append(measure("step", case.name, case.about, lineup, self.repeats))
        self.bytes_per_weight = {name: _state_bytes(optimizer) / case.weights for name, optimizer in optimizers.items()}

    def bars(self) -> Iterator[Bar]:
        for name, reached in self.bytes_per_weight.items():
            yield Bar(f"state per weight: {name}", KINDS[name].bytes_per_weight, reached, "bytes")
        for measured in self.measurements:
            for name, kind in KINDS.items():
                if kind.step is not None:
                    yield from not_much_slower(f"step, {name} against float32", measured, name, FLOAT32, kind.step)

    def show(self, console: Console) -> None:
        for name, reached in self.bytes_per_weight.items():
            console.print(f"{name}: {reached:.3f} bytes of state per weight")
        if self.measurements:
            ratios = {f"{name.replace(', ', chr(10))}\n/ float32": (name, FLOAT32) for name in KINDS if name != FLOAT32}
            console.print(times("One step by kind of state", self.measurements, tuple(KINDS), ratios))

    def draw(self, figure: Figure) -> bool:
        if not self.measurements:
            return False
        places = figure.subplots(1, len(self.measurements), sharey=True, squeeze=False)[0]
        for place, measured in zip(places, self.measurements, strict=True):
            names = list(measured.timings)
            place.barh(names[::-1], [measured.timings[name].median * 1e3 for name in names[::-1]], color="#4477aa")
            place.set_title(f"{measured.about}\n{measured.threads} thread{'s' * (measured.threads > 1)}", fontsize=8)
            place.set_xlabel("ms a step (median)")
        return True

    def findings(self) -> dict[str, Any]:
        return {"state_bytes_per_weight": dict(self.bytes_per_weight)}


def _state_bytes(optimizer: SparseAdam) -> int:
    return sum(slot.nbytes for param in weights(optimizer) for slot in _slots(optimizer, param))


def _slots(optimizer: SparseAdam, param: Tensor) -> list[Tensor]:
    return [slot for slot in optimizer.state[param].values() if isinstance(slot, Tensor)]


def _check_agreement() -> None:
    """The kernels against the reference: what is timed must be the rule."""
    for name, kind in KINDS.items():
        tables = []
        for backend in ("numba", "reference"):
            before = os.environ.get("ROWSTEP_BACKEND")
            os.environ["ROWSTEP_BACKEND"] = backend
            try:
                optimizer = SparseAdam(cases.parameters(_SMALL), **kind.options)
                for batch in cases.gradients(_SMALL):
                    give(optimizer, batch)
                    optimizer.step()
            finally:
                os.environ.pop("ROWSTEP_BACKEND") if before is None else os.environ.update(ROWSTEP_BACKEND=before)
            tables.append(weights(optimizer)[0].detach())
        check_close(name, tables[0], tables[1])

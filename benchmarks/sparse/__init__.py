"""The suite `sparse`: rowstep.SparseAdam against torch's optimizers and against the memory itself."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from benchmarks import cases
from benchmarks.cases import LONG, MANY, SMALL, TINY_MANY, TINY_UNIFORM, TINY_ZIPF, UNIFORM, ZIPF, Case, short
from benchmarks.contenders import ADAM, ROOFLINE, ROWSTEP, TORCH, check_agreement, give, looper, stepper, weights
from benchmarks.report import LOOP, Grid, times
from benchmarks.sparse import fresh, roofline
from benchmarks.suite import Bar, Part, Suite
from benchmarks.timing import BUSY, Contender, measure, nothing, threads
from rowstep import SparseAdam

# Each with how many times faster than torch.optim.SparseAdam it is to be: with one thread, with more.
FULL = {ZIPF: (6, 8), UNIFORM: (7, 9), LONG: (6, 6), SMALL: (6, 6), MANY: (5, 5)}
QUICK = dict.fromkeys((TINY_ZIPF, TINY_UNIFORM, TINY_MANY), (0, 0))
OVER_ROOFLINE = 1.4
OVER_DENSE_ADAM = 1.1
PEAK_BYTES_PER_ID = 64
LAYERS = ((256, 512), (512, 512), (512, 10))  # of the network with dense gradients
FIRST_STEP = {"cold": 6, "cached": 1}  # seconds


class SparseSuite(Suite):
    file = "sparse"

    def parts(self) -> Iterator[Part]:
        yield Part("first-step", self._first_step)
        yield Part("memory", self._memory)
        for case, faster_by in (QUICK if self.quick else FULL).items():
            yield Part(case.name, functools.partial(self._steps, case, faster_by))
        yield Part("dense", self._dense)

    def _first_step(self) -> None:
        self.findings["first_step_seconds"] = found = fresh.first_step()
        for kind, limit in FIRST_STEP.items():
            busy = found["others"] > BUSY
            self.bars.append(Bar(f"first step, kernels {kind}", limit, found[kind], " s", disturbed=busy))

    def _memory(self) -> None:
        rows, ids = ((20_000,), 16_384) if self.quick else ((100_000, 1_000_000, 4_000_000), 65_536)
        self.findings["peak_memory_bytes_per_id"] = peaks = fresh.peak_memory(rows, ids)
        if peaks:
            worst = max(peak["rowstep"] for peak in peaks)
            self.bars.append(Bar("peak extra memory of a step, per id", PEAK_BYTES_PER_ID, worst, " B"))

    def _steps(self, case: Case, faster_by: tuple[float, float]) -> None:
        """rowstep and torch step through the same gradients from the same weights; then whole loops with them."""
        gradients = cases.gradients(case)
        ours, theirs = SparseAdam(cases.parameters(case)), torch.optim.SparseAdam(cases.parameters(case))
        pair = stepper(ROWSTEP, ours, gradients), stepper(TORCH, theirs, gradients)
        loops = looper(ROWSTEP, ours, gradients), looper(TORCH, theirs, gradients)
        for count in self.threads:
            with threads(count):
                for contender in pair:
                    contender.warm_up(3)
                check_agreement(case.name, ours, theirs)
                lineup = [*pair, roofline.contender(ours, gradients, count)]
                measured = measure("step", case.name, case.about, lineup, self.repeats)
                self.measurements += [measured, measure("loop", case.name, case.about, loops, self.repeats)]
            self.expect_faster("step vs torch SparseAdam", measured, ROWSTEP, TORCH, faster_by[count > 1])
            if case is UNIFORM and count == 1:
                self.expect_at_most("step over roofline", measured, ROWSTEP, ROOFLINE, OVER_ROOFLINE)

    def _dense(self) -> None:
        """Parameters with dense gradients, which rowstep steps like Adam."""
        rows = 20_000 if self.quick else 1_000_000
        models: dict[str, Callable[[], nn.Module]] = {
            f"{short(rows)} x 64": lambda: nn.Embedding(rows, 64),
            "256-512-512-10 network": lambda: nn.Sequential(*(nn.Linear(*size) for size in LAYERS)),
        }
        for about, model in models.items():
            fused = functools.partial(torch.optim.Adam, fused=True)
            ours, theirs = (_with_dense_gradients(model, make) for make in (SparseAdam, fused))
            with threads(max(self.threads)):
                lineup = [Contender(ROWSTEP, nothing, ours.step), Contender(ADAM, nothing, theirs.step)]
                for contender in lineup:
                    contender.warm_up(3)
                check_agreement(about, ours, theirs)
                measured = measure("dense", about, f"{about}, dense gradients", lineup, self.repeats)
            self.measurements.append(measured)
            self.expect_at_most("step over Adam(fused)", measured, ROWSTEP, ADAM, OVER_DENSE_ADAM)

    def tables(self) -> Iterator[Grid | str]:
        if steps := self.of_kind("step"):
            ratios = {"torch/\nrowstep": (TORCH, ROWSTEP), "rowstep/\nroofline": (ROWSTEP, ROOFLINE)}
            yield times("One step", steps, (ROWSTEP, TORCH, ROOFLINE), ratios)
            yield times(LOOP, self.of_kind("loop"), (ROWSTEP, TORCH), {"torch/\nrowstep": (TORCH, ROWSTEP)})
        if dense := self.of_kind("dense"):
            yield times("Dense parameters", dense, (ROWSTEP, ADAM), {"rowstep/\nAdam": (ROWSTEP, ADAM)})
        if peaks := self.findings.get("peak_memory_bytes_per_id"):
            lines = [[short(peak["rows"]), *(f"{peak[who]:,.1f}" for who in ("rowstep", "torch"))] for peak in peaks]
            headings = ["rows in the table", ROWSTEP, TORCH]
            yield Grid("Peak extra memory of a step, bytes per id", headings, lines, words=0)
        if found := self.findings.get("first_step_seconds"):
            yield (
                f"First step of a fresh interpreter: {found['cold']:.2f} s, and {found['cached']:.2f} s with the "
                "kernels cached."
            )


def _with_dense_gradients(model: Callable[[], nn.Module], make: Callable[..., torch.optim.Optimizer]) -> Any:
    torch.manual_seed(0)
    optimizer = make(model().parameters())
    give(optimizer, [torch.randn_like(parameter) for parameter in weights(optimizer)])
    return optimizer

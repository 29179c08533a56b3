"""The suite `gpu`: one step on whatever GPU there is, after a check that all results agree.

    python -m benchmarks gpu [options]

Rowstep's kernels against its own reference, torch's SparseAdam, and torch's fused Adam on the dense gradient. Nobody
has run it on a GPU yet. Where there is none, it says so and measures nothing.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks import cases
from benchmarks.cases import LONG, MANY, TINY_MANY, TINY_UNIFORM, TINY_ZIPF, UNIFORM, ZIPF, Case
from benchmarks.contenders import ADAM, ROWSTEP, TORCH, check_agreement, give
from benchmarks.report import Grid, times
from benchmarks.suite import Part, Suite
from benchmarks.timing import Contender
from rowstep import SparseAdam

REFERENCE = "rowstep reference"
DEVICE = "cuda"

FULL = (ZIPF, UNIFORM, replace(LONG, name="zipf-10m", zipf=True), LONG, MANY)
QUICK = (TINY_ZIPF, TINY_UNIFORM, TINY_MANY)

# Whose step is to be what whose step is. torch's Adam moves every row, so it is compared with nobody.
SAME = {ROWSTEP: TORCH, REFERENCE: TORCH}


class GpuSuite(Suite):
    file = "gpu"
    own_threads = "measures a GPU"

    @staticmethod
    def unavailable() -> str:
        if DEVICE == "cuda" and not torch.cuda.is_available():
            return "There is no GPU here: nothing was measured."
        return ""

    def parts(self) -> Iterator[Part]:
        for case in QUICK if self.quick else FULL:
            yield Part(case.name, functools.partial(self._steps, case))

    def _steps(self, case: Case) -> None:
        pool = [[gradient.to(DEVICE) for gradient in batch] for batch in cases.gradients(case)]
        makers: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
            ROWSTEP: SparseAdam, REFERENCE: SparseAdam, TORCH: torch.optim.SparseAdam,
            ADAM: functools.partial(torch.optim.Adam, fused=True),
        }  # fmt: skip
        optimizers = {
            name: make([nn.Parameter(param.to(DEVICE)) for param in cases.parameters(case)])
            for name, make in makers.items()
        }
        for name, optimizer in optimizers.items():
            # A table keeps the backend of its first step.
            backend = "reference" if name == REFERENCE else os.environ.get("ROWSTEP_BACKEND", "")
            with mock.patch.dict(os.environ, ROWSTEP_BACKEND=backend):
                _give(name, optimizer, pool[0])
                optimizer.step()
        for ours, theirs in SAME.items():
            check_agreement(f"{case.about}, {ours}", optimizers[ours], optimizers[theirs])
        lineup = [_stepper(name, optimizer, pool) for name, optimizer in optimizers.items()]
        self.findings["device"] = torch.cuda.get_device_name() if DEVICE == "cuda" else DEVICE
        for _ in self.measure("step", case, lineup):
            pass

    def tables(self) -> Iterator[Grid | str]:
        yield f"On {self.findings.get('device')}"
        ratios = {f"{name}\n/ {ROWSTEP}": (name, ROWSTEP) for name in (REFERENCE, TORCH, ADAM)}
        yield times("One step on a GPU", self.measurements, (ROWSTEP, REFERENCE, TORCH, ADAM), ratios)


def _give(name: str, optimizer: torch.optim.Optimizer, gradients: Sequence[Tensor]) -> None:
    give(optimizer, [gradient.to_dense() for gradient in gradients] if name == ADAM else gradients)


def _stepper(name: str, optimizer: torch.optim.Optimizer, pool: Sequence[Sequence[Tensor]]) -> Contender:
    """Steps that are timed until the device is done with them."""

    def prepare(number: int) -> None:
        _give(name, optimizer, pool[number % len(pool)])
        _wait()

    def run() -> None:
        optimizer.step()
        _wait()

    return Contender(name, prepare, run)


def _wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()

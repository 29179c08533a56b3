"""The suite `memory`: one step of SparseAdam with every kind of state, side by side, and the bytes that each keeps."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from benchmarks import cases
from benchmarks.cases import TINY_UNIFORM, TINY_ZIPF, UNIFORM, ZIPF, Case
from benchmarks.contenders import check_close, state_bytes, stepper, weights
from benchmarks.report import Grid, times
from benchmarks.suite import Bar, Part, Suite
from rowstep import SparseAdam

FLOAT32 = "float32"
FULL = (UNIFORM, ZIPF)
QUICK = (replace(TINY_UNIFORM, dim=64), replace(TINY_ZIPF, dim=64))
SMALL = Case("agreement", 300, 16, 200)


class Kind(NamedTuple):
    options: dict[str, Any]
    bytes_per_weight: float  # at most, beyond the weight itself, in a table of 64 columns
    step: float | None = None  # how long a step may take, in steps with state in float32


BFLOAT16, ROW = {"state_dtype": torch.bfloat16}, {"second_moment": "row"}
KINDS = {
    FLOAT32: Kind({}, 8),
    "bfloat16": Kind(BFLOAT16, 4, 1.0),
    "row": Kind(ROW, 4.1, 0.8),
    "bfloat16 and row": Kind(BFLOAT16 | ROW, 2.1),
    "row, no first": Kind(ROW | {"betas": (0.0, 0.999)}, 0.07, 0.55),
}


class MemorySuite(Suite):
    file = "memory"

    def parts(self) -> Iterator[Part]:
        for case in QUICK if self.quick else FULL:
            yield Part(case.name, functools.partial(self._steps, case))

    def _steps(self, case: Case) -> None:
        check_agreement()
        optimizers = {name: SparseAdam(cases.parameters(case), **kind.options) for name, kind in KINDS.items()}
        pool = cases.gradients(case)
        lineup = [stepper(name, optimizer, pool) for name, optimizer in optimizers.items()]
        for measured in self.measure("step", case, lineup):
            for name, kind in KINDS.items():
                if kind.step is not None:
                    self.expect_at_most(f"step, {name} against float32", measured, name, FLOAT32, kind.step)
        kept = {name: state_bytes(optimizer) for name, optimizer in optimizers.items()}
        self.findings["state_bytes_per_weight"] = kept
        self.bars += [Bar(f"state per weight: {name}", KINDS[name].bytes_per_weight, kept[name], " B") for name in kept]

    def tables(self) -> Iterator[Grid | str]:
        for name, kept in self.findings.get("state_bytes_per_weight", {}).items():
            yield f"{name}: {kept:.3f} bytes of state per weight"
        ratios = {f"{name.replace(', ', chr(10))}\n/ float32": (name, FLOAT32) for name in KINDS if name != FLOAT32}
        yield times("One step by kind of state", self.measurements, tuple(KINDS), ratios)


@functools.cache
def check_agreement() -> None:
    """The kernels against the reference: what is timed must be the rule."""
    for name, kind in KINDS.items():
        ours, reference = (_stepped(backend, kind) for backend in ("numba", "reference"))
        check_close(name, ours, reference)


def _stepped(backend: str, kind: Kind) -> Tensor:
    with mock.patch.dict(os.environ, ROWSTEP_BACKEND=backend):
        optimizer = SparseAdam(cases.parameters(SMALL), **kind.options)
        stepper("", optimizer, cases.gradients(SMALL)).warm_up(SMALL.batches)
    return weights(optimizer)[0].detach()

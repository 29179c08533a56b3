"""The suite `memory`: one step of SparseAdam with every kind of state, side by side, and the bytes that each keeps.

Also for the tables of language models that are too large for a GPU, at their width.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

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

# Rows and columns; docs/memory.md says where they were read. Weights are bfloat16, and so are moments unless told.
MODELS = {
    "Qwen3.8-Flash-Next": (320_001_536, 160),
    "DeepSeek-V4.1-Flash": (768_022_850, 256),
    "Gemma 3n E4B": (262_144, 8_960),
}
OF_MODELS = {name: {"state_dtype": torch.float32} | kind.options for name, kind in KINDS.items()}
MEASURED_WEIGHTS = 80_000_000


class MemorySuite(Suite):
    file = "memory"

    def parts(self) -> Iterator[Part]:
        for case in QUICK if self.quick else FULL:
            yield Part(case.name, functools.partial(self._steps, case))
        yield Part("models", self._models)

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

    def _models(self) -> None:
        self.findings["models"] = lines = []
        for name, (rows, dim) in MODELS.items():
            some = MEASURED_WEIGHTS // dim // (1000 if self.quick else 1)
            case = Case(name, some, dim, min(65_536, max(1, some // 16)))
            (weight,), pool = cases.parameters(case), [[each.bfloat16()] for (each,) in cases.gradients(case)]
            optimizers = {kind: SparseAdam([nn.Parameter(weight.bfloat16())], **of) for kind, of in OF_MODELS.items()}
            for measured in self.measure(
                "models", case, [stepper(kind, each, pool) for kind, each in optimizers.items()]
            ):
                for kind, optimizer in optimizers.items():
                    gigabytes = rows * dim * 2 / 1e9, rows * dim * state_bytes(optimizer) / 1e9
                    speed = case.ids / measured.timings[kind].min / 1e3
                    lines.append(
                        [name, kind, str(measured.threads), *(f"{each:,.1f}" for each in gigabytes), f"{speed:,.0f}"]
                    )

    def tables(self) -> Iterator[Grid | str]:
        for name, kept in self.findings.get("state_bytes_per_weight", {}).items():
            yield f"{name}: {kept:.3f} bytes of state per weight"
        ratios = {f"{name.replace(', ', chr(10))}\n/ float32": (name, FLOAT32) for name in KINDS if name != FLOAT32}
        if steps := self.of_kind("step"):
            yield times("One step by kind of state", steps, tuple(KINDS), ratios)
        if lines := self.findings.get("models"):
            headings = ["model", "state", "threads", "GB of weights", "GB of state", "thousand rows a second"]
            yield Grid("Tables of language models", headings, lines, words=2)


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

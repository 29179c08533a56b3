"""Compile what steps ask for, without a device: ``python -m tests.gpu.compiled cuda:90`` or ``hip:gfx942``.

What would be launched is compiled instead, with the very arguments that the package passes. Prints a line of JSON for
each kernel: its name, the case that has asked for it, and what the compiler says of it. With ``all`` behind the target
every combination of options is tried; otherwise every pair of values of two options is.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# ruff: noqa: E402  before anything imports Triton:
os.environ["TRITON_INTERPRET"], os.environ["ROWSTEP_BACKEND"] = "0", "triton"

import torch
import triton
from torch import Tensor
from torch.nn import Parameter
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from rowstep import DeferredAdamW, SparseAdam, clip_grad_norm_
from rowstep._backends import triton as backend
from tests.helpers.gradients import rows_of, set_grad

Case = dict[str, Any]

FLOATS = [torch.bfloat16, torch.float32, torch.float64]

FACTORS: dict[str, list[Any]] = {
    "optimizer": [SparseAdam, DeferredAdamW],
    "kept": ["element", "maximum", "row", "row without momentum"],
    "dtype": FLOATS,
    "grad_dtype": FLOATS,
    "state_dtype": [None, *FLOATS],
    "stochastic_rounding": [False, True],
    "weight_decay": [0.0, 0.1],
    "bias_correction": ["global", "row"],
    "nonfinite": ["propagate", "skip"],
    "is_dense": [False, True],
    "columns": [3, 64, 1500],
    "count": [5, 100],
    "norm_type": [2.0, torch.inf],
}

# What every combination is tried of, if asked to: the options of a kernel, for one table.
OPTIONS = ("optimizer", "kept", "state_dtype", "weight_decay", "bias_correction", "nonfinite", "is_dense")

KEPT: dict[str, Case] = {
    "element": {},
    "maximum": {"amsgrad": True},
    "row": {"second_moment": "row"},
    "row without momentum": {"second_moment": "row", "betas": (0.0, 0.9)},
}


def is_possible(case: Case) -> bool:
    if case["stochastic_rounding"] and case["dtype"] is not torch.bfloat16:
        return False
    if case["optimizer"] is DeferredAdamW:
        return bool(case["bias_correction"] == "global" and case["nonfinite"] == "propagate")
    # A dense gradient is torch's to step unless something is kept that torch cannot take.
    is_torchs = case["kept"] in ("element", "maximum") and case["state_dtype"] in (None, case["dtype"])
    return not (case["is_dense"] and is_torchs and not case["stochastic_rounding"])


def every_combination() -> Iterator[Case]:
    base = {name: values[1 if len(values) > 2 else 0] for name, values in FACTORS.items()}
    for values in itertools.product(*(FACTORS[name] for name in OPTIONS)):
        case = base | dict(zip(OPTIONS, values, strict=True))
        if is_possible(case):
            yield case


def every_pair() -> Iterator[Case]:
    """Cases in which every two values of two factors that are possible together come together."""
    choice = random.Random(0)
    drawn = [{name: choice.choice(values) for name, values in FACTORS.items()} for _ in range(6000)]
    cases = [case for case in drawn if is_possible(case)]
    left = set().union(*map(_pairs, cases))
    while left:
        best = max(cases, key=lambda case: len(_pairs(case) & left))
        left -= _pairs(best)
        yield best


def _pairs(case: Case) -> set[Any]:
    return set(itertools.combinations(((name, str(value)) for name, value in case.items()), 2))


def step(case: Case) -> None:
    """Steps that ask for the kernels of a case."""
    options = {name: case[name] for name in ("state_dtype", "stochastic_rounding", "weight_decay")} | KEPT[case["kept"]]
    if case["optimizer"] is SparseAdam:
        options |= {name: case[name] for name in ("bias_correction", "nonfinite")}
    param = Parameter(torch.zeros(7, case["columns"], dtype=case["dtype"]))
    optimizer = case["optimizer"]([param], **options)
    ids = torch.zeros(case["count"], dtype=torch.int64)
    grads: list[Tensor] = [rows_of(param, ids, 1.0).to(case["grad_dtype"])] * 2
    if case["is_dense"]:
        grads[1] = torch.zeros_like(param).to(case["dtype"])
    for grad in grads:
        if case["optimizer"] is DeferredAdamW:
            optimizer.catch_up(param, ids)
        set_grad(param, grad)
        clip_grad_norm_(param, 1.0, case["norm_type"])
        optimizer.step()


class Target:
    """Stands for the driver of a device that is not there."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def resources(kernel: Any) -> dict[str, int]:
    """Registers, bytes spilled and shared memory of a kernel, as the compiler reports them."""
    if "amdgcn" in kernel.asm:
        said, wanted = kernel.asm["amdgcn"], {"registers": r"\.vgpr_count: +", "spilled": r"\.vgpr_spill_count: +"}
    else:
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            Path(file.name).write_bytes(kernel.asm["cubin"])
            said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
        wanted = {"registers": "REG:", "spilled": "STACK:"}
    numbers = {key: int(re.findall(rf"{name}(\d+)", said)[0]) for key, name in wanted.items()}
    return numbers | {"shared": kernel.metadata.shared, "warps": kernel.metadata.num_warps}


def main(name: str, which: str = "pairs") -> None:
    kind, architecture = name.split(":")
    is_cuda = kind == "cuda"
    target = GPUTarget(kind, int(architecture) if is_cuda else architecture, 32 if is_cuda else 64)
    driver.set_active(Target(target))
    backend._DEVICE = "cpu"
    case: Case = {}
    compiled: dict[int, Any] = {}
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        assert kernel.asm["cubin" if is_cuda else "hsaco"]
        assert "fp32" not in kernel.src.signature.values()  # scalars are of float64, whatever is computed with
        if id(kernel) not in compiled:
            compiled[id(kernel)] = kernel
            about = {"kernel": self.fn.__name__, "case": {name: str(value) for name, value in case.items()}}
            print(json.dumps(about | resources(kernel)))
        return kernel

    JITFunction.run = compile_only
    cases = every_combination() if which == "all" else every_pair()
    for case in cases:
        step(case)
    print(json.dumps({"target": name, "kernels": len(compiled)}))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Compile what steps ask for, without a device: ``python -m tests.gpu.compiled cuda:90`` or ``hip:gfx942``.

What would be launched is compiled instead, with the very arguments that the package passes. Prints a line of JSON for
each kernel: its name, the case that has asked for it, and what the compiler says of it. Every pair of values of
two options is tried; with ``all`` behind the target, every combination of options for one table too.
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# ruff: noqa: E402  before anything imports Triton:
os.environ["TRITON_INTERPRET"], os.environ["ROWSTEP_BACKEND"] = "0", "triton"

import torch
import triton
from torch import Tensor
from torch.nn import Parameter
from triton.backends.amd.compiler import HIPBackend
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import CompiledKernel
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from rowstep import DeferredAdamW, SparseAdam, clip_grad_norm_
from rowstep._backends import triton as backend
from rowstep._triton import rows as over_rows
from tests.helpers.gradients import set_grad, sparse

Case = dict[str, Any]

# What loads the two numbers of a thread, by the size of a number: of a row of 64 in 32 threads.
WIDE_LOADS = {2: "ld.global.b32", 4: "ld.global.v2.b32", 8: "ld.global.v2.b64"}

FLOATS = [torch.bfloat16, torch.float32, torch.float64]

FACTORS: dict[str, list[Any]] = {
    "optimizer": [SparseAdam, DeferredAdamW],
    "kept": ["element", "maximum", "row", "row without momentum", "element without momentum"],
    "dtype": FLOATS,
    "grad_dtype": FLOATS,
    "state_dtype": [None, *FLOATS],
    "stochastic_rounding": [False, True],
    "weight_decay": [0.0, 0.1],
    "bias_correction": ["global", "row"],
    "nonfinite": ["propagate", "skip"],
    "is_dense": [False, True],
    "columns": [1, 3, 64, 1500],
    "count": [5, 100],
    "is_expanded": [False, True],
    "is_large": [False, True],
    "norm_type": [2.0, 3.0, torch.inf],
}

# What every combination is tried of, if asked to: the options of a kernel, for one table.
OPTIONS = ("optimizer", "kept", "state_dtype", "weight_decay", "bias_correction", "nonfinite", "is_dense")

KEPT: dict[str, Case] = {
    "element": {},
    "maximum": {"amsgrad": True},
    "row": {"second_moment": "row"},
    "row without momentum": {"second_moment": "row", "betas": (0.0, 0.9)},
    "element without momentum": {"betas": (0.0, 0.9)},
}


def is_possible(case: Case) -> bool:
    if case["stochastic_rounding"] and case["dtype"] is not torch.bfloat16:
        return False
    if case["optimizer"] is DeferredAdamW:
        return bool(case["bias_correction"] == "global" and case["nonfinite"] == "propagate")
    # A dense gradient is torch's to step unless something is kept that torch cannot take.
    is_torchs = not case["kept"].startswith("row") and case["state_dtype"] in (None, case["dtype"])
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


def step(case: Case, rows: int = 7) -> None:
    """Steps that ask for the kernels of a case, with a table of so many rows."""
    options = {name: case[name] for name in ("state_dtype", "stochastic_rounding", "weight_decay")} | KEPT[case["kept"]]
    if case["optimizer"] is SparseAdam:
        options |= {name: case[name] for name in ("bias_correction", "nonfinite")}
    param = Parameter(torch.zeros(rows, case["columns"], dtype=case["dtype"]))
    optimizer = case["optimizer"]([param], **options)
    ids = torch.zeros(case["count"], dtype=torch.int64)
    shape = case["count"], case["columns"]
    values = torch.ones(shape, dtype=case["grad_dtype"])
    if case["is_expanded"]:  # as sum().backward() has them
        values = values.as_strided(shape, (0, 0))
    grads: list[Tensor] = [sparse(ids.unsqueeze(0), values, param.shape)] * 2
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


def unordered(ttir: str) -> set[str]:
    """Arguments of which a program reads a number and then writes one, without a barrier: they are what warps race for.

    All threads load it, and the store is one thread's.
    """
    base: dict[str, str] = {}
    read: set[str] = set()
    found: set[str] = set()
    for line in ttir.splitlines():
        if "barrier" in line:
            read.clear()
        elif moved := re.search(r"(%[\w#]+) = tt\.addptr (%[\w#]+)", line):
            base[moved[1]] = base.get(moved[2], moved[2])
        elif use := re.search(r"tt\.(load|store) (%[\w#]+).* : !tt\.ptr<", line):  # those of blocks have a tensor<
            place = base.get(use[2], use[2])
            if use[1] == "load":
                read.add(place)
            elif place in read:
                found.add(place)
    return found


def check(kernel: Any, is_cuda: bool) -> None:
    """What can be told of a kernel by its text."""
    signature, asm = kernel.src.signature, kernel.asm
    assert asm["cubin" if is_cuda else "hsaco"]
    assert "fp32" not in signature.values(), signature  # scalars are of float64, whatever is computed with
    assert {name for name, kind in signature.items() if kind == "i32"} <= {
        "width",
        "column_stride",
    }  # or offsets overflow
    assert unordered(asm["ttir"]) <= {"%skipped"}, unordered(asm["ttir"])  # whose sum goes nowhere else
    assert "atomic" not in asm["ttir"]


def launch(kernel: Any, grid: tuple[int, int, int]) -> Callable[..., None]:
    """In the place of a launch: look whether the arguments are where the kernel expects them."""

    def launched(*args: Any) -> None:
        assert len(grid) == 3
        assert len(args) == len(kernel.src.fn.arg_names)
        for (index,), value in kernel.src.constants.items():
            assert args[index] == value, (kernel.name, index, args[index], value)

    return launched


def main(name: str, which: str = "pairs") -> None:
    kind, architecture = name.split(":")
    is_cuda = kind == "cuda"
    target = GPUTarget(kind, int(architecture) if is_cuda else architecture, 32 if is_cuda else 64)
    driver.set_active(Target(target))
    backend._DEVICE = "cpu"
    case: Case = {}
    again: Case = {}
    compiled: dict[int, Any] = {}
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        assert warmup, "everything is compiled before anything is launched"
        assert kwargs["enable_fp_fusion"], "or Triton 3.9 warns, and the next ones do not fuse"
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        if "sums" in self.arg_names:  # a norm of 0: the step gets the gradient as it was, and not a scaled copy
            args[self.arg_names.index("sums")].zero_()
        if id(kernel) not in compiled:
            assert case is not again, (self.fn.__name__, case)  # another step asks for other kernels
            check(kernel, is_cuda)
            if is_cuda and self.fn is over_rows.sum_chunks.fn and case["columns"] == 64 and not case["is_expanded"]:
                size = case["grad_dtype"].itemsize
                assert kernel.asm["ptx"].count(WIDE_LOADS[size]) == 8, "reads several numbers at once, and eight rows"
            compiled[id(kernel)] = kernel
            about = {"kernel": self.fn.__name__, "case": {name: str(value) for name, value in case.items()}}
            print(json.dumps(about | resources(kernel)))
        return kernel

    JITFunction.run, CompiledKernel.__getitem__ = compile_only, launch
    # Tables of more than 2 GB: AMD's compiler takes 32 bits for offsets where it may.
    HIPBackend.is_within_2gb = lambda _: not case["is_large"]
    for case in itertools.chain(every_pair(), every_combination() if which == "all" else ()):
        step(case)
        for count in (1, 16) if case["count"] < 64 else (64, 101):  # which Triton could make kernels of their own for
            case = again = case | {"count": count}
            step(case, rows=count % 50)  # a dense gradient with 64 rows would be one with chunks
    print(json.dumps({"target": name, "kernels": len(compiled)}))


if __name__ == "__main__":
    main(*sys.argv[1:])

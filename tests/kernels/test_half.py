"""float16 in the kernels: the bits that IEEE asks for, on processors with instructions for it and on those without."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from numba import njit
from numba.core.registry import cpu_target
from numpy.typing import NDArray

from rowstep import SparseAdam
from rowstep._kernels import floats, half
from tests.helpers.gradients import rows_of, step_with, table

Numbers = NDArray[Any]

# Intrinsics take one argument less than they are written with.
widen: Any = floats.widen
narrow: Any = floats.narrow

with_and_without_instructions = pytest.mark.parametrize("instructions", [True, False])


def choose(monkeypatch: pytest.MonkeyPatch, instructions: bool) -> None:
    if instructions and not half.has_instructions(cpu_target.target_context):
        pytest.skip("this processor does not convert halfs itself")
    monkeypatch.setattr(half, "has_instructions", lambda context: instructions)


def widened(halfs: Numbers) -> Numbers:
    """float16 as float32, compiled anew at every call."""

    @njit
    def convert(numbers: Any, out: Any) -> None:
        for i in range(numbers.size):
            out[i] = widen(numbers[i], out)

    out = np.empty(halfs.size, np.float32)
    convert(halfs.view(np.int16), out)
    return out


def narrowed(singles: Numbers) -> Numbers:
    """float32 as float16, compiled anew at every call."""

    @njit
    def convert(numbers: Any, out: Any) -> None:
        for i in range(numbers.size):
            out[i] = narrow(numbers[i], out)

    out = np.empty(singles.size, np.int16)
    convert(singles, out)
    return out.view(np.float16)


def assert_same_bits(found: Numbers, expected: Numbers) -> None:
    """The payload of a NaN is free, its sign is not."""
    as_bits = f"u{found.itemsize}"
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(found), nan)
    np.testing.assert_array_equal(np.signbit(found), np.signbit(expected))
    np.testing.assert_array_equal(found[~nan].view(as_bits), expected[~nan].view(as_bits))


EVERY_HALF: Numbers = np.arange(1 << 16, dtype=np.uint16).view(np.float16)


def floats_around_every_rounding() -> Numbers:
    """Every half and every tie between two halfs, with their neighbours, all scales, and anything else."""
    with np.errstate(invalid="ignore"):
        halfs = EVERY_HALF.astype(np.float32).view(np.uint32)
    ties = halfs + np.uint32(1 << 12)
    # Between subnormal halfs a tie is a multiple of 2**-25.
    tiny_ties = (np.arange(1 << 11, dtype=np.float32) * np.float32(2.0**-25)).view(np.uint32)
    scales = np.arange(1 << 16, dtype=np.uint32) << 16
    anything = np.random.default_rng(0).integers(0, 1 << 32, 1_000_000, dtype=np.uint32)
    corners = np.concatenate([halfs, ties, tiny_ties, scales])
    beside = [corners - np.uint32(1), corners + np.uint32(1)]
    everything: Numbers = np.concatenate([corners, *beside, corners ^ np.uint32(1 << 31), anything])
    return everything.view(np.float32)


@with_and_without_instructions
def test_every_half_is_widened_exactly(instructions: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    choose(monkeypatch, instructions)
    with np.errstate(invalid="ignore"):
        assert_same_bits(widened(EVERY_HALF), EVERY_HALF.astype(np.float32))


@with_and_without_instructions
def test_floats_are_rounded_to_the_nearest_half_ties_to_even(
    instructions: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose(monkeypatch, instructions)
    singles = floats_around_every_rounding()
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        assert_same_bits(narrowed(singles), singles.astype(np.float16))


def test_both_ways_agree_on_the_payload_of_nans_too(monkeypatch: pytest.MonkeyPatch) -> None:
    singles = floats_around_every_rounding()
    found = []
    for instructions in (True, False):
        choose(monkeypatch, instructions)
        found.append((widened(EVERY_HALF).view(np.uint32), narrowed(singles).view(np.uint16)))
    for with_them, without in zip(*found, strict=True):
        np.testing.assert_array_equal(with_them, without)


@with_and_without_instructions
def test_subnormal_halfs_survive_flushing_of_denormals(instructions: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A subnormal half is a normal float32, so ``torch.set_flush_denormal`` does not concern it."""
    choose(monkeypatch, instructions)
    subnormal = EVERY_HALF[1:1024]
    expected = subnormal.astype(np.float32)
    widened(subnormal), narrowed(expected)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        assert_same_bits(widened(subnormal), expected)
        assert_same_bits(narrowed(expected), subnormal)
    finally:
        torch.set_flush_denormal(False)


STEP_OF_HALFS = """
import torch
from tests.helpers.gradients import rows_of, step_with, table
from rowstep import SparseAdam
torch.set_num_threads(1)
torch.manual_seed(0)
param = table(20, 33, dtype=torch.float16)
step_with(SparseAdam([param]), param, rows_of(param, [3, 7, 3]))
print(param.detach().view(torch.int16).sum().item(), param[7, 0].item())
"""


def test_a_step_of_float16_on_a_processor_without_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROWSTEP_BACKEND", "numba")
    environment = os.environ | {"NUMBA_CPU_NAME": "generic", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", STEP_OF_HALFS], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    param = table(20, 33, dtype=torch.float16)
    step_with(SparseAdam([param]), param, rows_of(param, [3, 7, 3]))
    assert done.stdout.split() == [
        str(param.detach().view(torch.int16).sum().item()),
        str(param[7, 0].item()),
    ]

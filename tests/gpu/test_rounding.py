"""bfloat16 is rounded on the bits, as torch rounds it: Triton's interpreter would truncate."""

from __future__ import annotations  # noqa: I001  Triton is looked for first

from typing import Any

import torch

from tests.helpers import interpreter as interpreter  # skips, without Triton

import triton
import triton.language as tl

from rowstep._triton.numbers import load, store


@triton.jit  # type: ignore[untyped-decorator]
def copy(source: Any, target: Any, count: Any) -> None:
    at = tl.arange(0, 1024)
    store(target + at, at < count, load(source + at, at < count, tl.float32), None)


def test_numbers_become_their_nearest_neighbour_ties_to_even() -> None:
    sizes = torch.logspace(-44, 38, 400, dtype=torch.float64).float()
    special = torch.tensor([0.0, 4.03, 1.00390625, 1.01171875, 3.3895e38, 3.4e38, torch.inf, torch.nan])
    odd_nan = torch.tensor([0x7F800001, 0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    exact = torch.cat([sizes, -sizes, special, -special, odd_nan])
    drawn = torch.zeros(len(exact), dtype=torch.bfloat16)
    copy[(1,)](exact, drawn, len(exact))
    torch.testing.assert_close(drawn, exact.bfloat16(), rtol=0, atol=0, equal_nan=True)

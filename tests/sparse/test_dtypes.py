"""16-bit tables: computed in float32, stored rounded to the nearest, and closer to the truth than torch's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from rowstep import SparseAdam
from tests.helpers.gradients import bits, copy_of, rows_of, same_bits, sparse, step_with, table

pytestmark = pytest.mark.usefixtures("backend")

SIXTEEN_BITS = [torch.float16, torch.bfloat16]


def all_patterns(dtype: torch.dtype) -> Tensor:
    """All 65,536 numbers of a 16-bit type: zeros, subnormals, infinities and NaNs among them."""
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)


def between_all_patterns(dtype: torch.dtype) -> Tensor:
    """float32 numbers on, halfway between, and just beside halfway between all neighbours of a 16-bit type."""
    below = all_patterns(dtype)
    above = (bits(below) + 1).view(dtype)
    halfway = ((below.double() + above.double()) / 2).float()
    halfway = halfway[halfway.isfinite()]
    infinity = torch.tensor(torch.inf)
    largest = torch.finfo(torch.float32).max
    extremes = torch.tensor([largest, -largest, 65519.99, 65520.0, 1e-45, -1e-45, torch.inf, -torch.inf, torch.nan])
    # Rounding the last of these as if it were a number carries into the sign: it would become -0.
    nans = torch.tensor([0x7F800001, 0x7FC00000, 0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    beside = halfway.nextafter(infinity), halfway.nextafter(-infinity)
    return torch.cat([below.float(), halfway, *beside, extremes, nans, -nans])


@pytest.mark.parametrize("numbers", [all_patterns, between_all_patterns])
@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
def test_storing_rounds_to_the_nearest_and_ties_to_even(
    dtype: torch.dtype, numbers: Callable[[torch.dtype], Tensor]
) -> None:
    """The first are a gradient of 16 bits, all of which are stored as they are; the others one of float32."""
    gradient = numbers(dtype)
    param = Parameter(torch.zeros(len(gradient), 1, dtype=dtype))
    optimizer = SparseAdam([param], betas=(0.0, 0.0))  # the first moment is then the gradient
    step_with(optimizer, param, sparse([range(len(gradient))], gradient.unsqueeze(1), param.shape))
    stored, expected = optimizer.state[param]["exp_avg"].squeeze(1), (gradient + 0).to(dtype)
    assert torch.equal(stored.isnan(), expected.isnan())
    assert same_bits(stored[~stored.isnan()], expected[~stored.isnan()])


@pytest.mark.parametrize(
    ("dtype", "addends", "total"),
    [(torch.bfloat16, [1.0] * 1000, 1000.0), (torch.float16, [60000.0, 60000.0, -60000.0, -60000.0, 3.0], 3.0)],
)
def test_duplicates_are_summed_in_float32(dtype: torch.dtype, addends: list[float], total: float) -> None:
    param = Parameter(torch.zeros(2, 1, dtype=dtype))
    optimizer = SparseAdam([param], betas=(0.0, 0.0), nonfinite="skip")
    step_with(optimizer, param, rows_of(param, [1] * len(addends), torch.tensor(addends)))
    assert optimizer.state[param]["exp_avg"].flatten().tolist() == [0.0, total]


@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
def test_each_step_is_closer_to_float64_than_torchs(dtype: torch.dtype) -> None:
    """Over a whole run the rounding of stored moments hides the rest, so each step starts from the same numbers."""
    ours = Parameter(table(40, 8).detach().to(dtype))
    theirs, truth = copy_of(ours), Parameter(ours.detach().double())
    params = (ours, theirs, truth)
    optimizers = (SparseAdam([ours]), torch.optim.SparseAdam([theirs]), SparseAdam([truth]))
    error = {"weights": [0.0, 0.0], "exp_avg": [0.0, 0.0], "exp_avg_sq": [0.0, 0.0]}
    for _ in range(20):
        grad = rows_of(ours, torch.randint(40, (400,)), torch.rand(400, 8))
        for optimizer, param in zip(optimizers, params, strict=True):
            step_with(optimizer, param, grad.to(param.dtype))
        for key, sums in error.items():
            results = [
                param.detach() if key == "weights" else optimizer.state[param][key]
                for optimizer, param in zip(optimizers, params, strict=True)
            ]
            for which in (0, 1):
                sums[which] += (results[which].double() - results[2]).square().sum().item()
            for other in results[1:]:
                other.copy_(results[0])
    for ours_off, theirs_off in error.values():
        assert ours_off < theirs_off


def test_the_default_eps_is_not_zero_for_float16() -> None:
    # In float16 it would be, and a first step with an explicit zero 0 / 0.
    param = table(3, 2, dtype=torch.float16)
    before = param.detach().clone()
    step_with(SparseAdam([param]), param, rows_of(param, [0, 2], 0.0))
    assert same_bits(param, before)

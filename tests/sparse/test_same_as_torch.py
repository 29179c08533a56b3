"""A sparse gradient steps as under torch.optim.SparseAdam, a dense one as under torch.optim.Adam."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import Parameter

from rowstep import SparseAdam
from tests.helpers.gradients import copy_of, ids_at_most_twice, rows_of, same_bits, step_with, table

pytestmark = pytest.mark.usefixtures("backend")

OPTIONS: list[dict[str, Any]] = [
    {},
    {"lr": 0.05, "betas": (0.5, 0.9), "eps": 1e-3},
    {"lr": 0.05, "betas": (0.0, 0.0)},
    {"maximize": True},
]


def pair(param: Parameter, **options: Any) -> tuple[SparseAdam, torch.optim.SparseAdam, Parameter]:
    """Our optimizer over ``param``, torch's over a copy, and the copy."""
    twin = copy_of(param)
    return SparseAdam([param], **options), torch.optim.SparseAdam([twin], **options), twin


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_moments_have_the_same_bits_over_60_steps(options: dict[str, Any], dtype: torch.dtype) -> None:
    ours = table(200, 9, dtype=dtype)
    optimizer, reference, theirs = pair(ours, **options)
    for step in range(60):
        grad = rows_of(ours, ids_at_most_twice(200, 60)) * 10.0 ** (step % 7 - 3)
        step_with(optimizer, ours, grad)
        step_with(reference, theirs, grad)
        for key in ("exp_avg", "exp_avg_sq"):
            assert same_bits(optimizer.state[ours][key], reference.state[theirs][key]), (key, step)
    # An update that differs in its last bit may round the weight the other way, by one ulp of the weight a step.
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(ours, theirs, rtol=60 * unit, atol=60 * 2 * options.get("lr", 1e-3) * unit)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_update_has_the_same_bits_where_torch_takes_the_right_root(options: dict[str, Any]) -> None:
    """torch's sqrt of an array may be the neighbour of the right number, more often on some processors than on others.

    That is one unit of the root; after it the sum with eps, the quotient and the product may each round the other way.
    """
    ours = table(200, 9)
    optimizer, reference, theirs = pair(ours, **options)
    for _ in range(60):
        with torch.no_grad():  # from zero, the weights are the update, and not rounded to a larger weight's ulp
            ours.zero_()
            theirs.zero_()
        grad = rows_of(ours, ids_at_most_twice(200, 60))
        step_with(optimizer, ours, grad)
        step_with(reference, theirs, grad)
        rows = grad.coalesce().indices()[0]
        v = optimizer.state[ours]["exp_avg_sq"][rows]
        right = v.sqrt() == v.double().sqrt().float()
        assert same_bits(ours[rows][right], theirs[rows][right])
        assert ((ours - theirs).abs() <= 4 * 2**-23 * theirs.abs()).all()


def test_duplicates_are_summed_in_order_of_occurrence() -> None:
    # In any other order a 1 meets the large number first and is lost: in float32, 2**25 + 1 is 2**25.
    addends = [2.0**25, -(2.0**25), 1.0, 3.0]
    param = Parameter(torch.zeros(3, 1))
    optimizer = SparseAdam([param], betas=(0.0, 0.0))
    step_with(
        optimizer,
        param,
        rows_of(param, [1, 2, 1, 1, 2, 1], torch.tensor([addends[0], 5, *addends[1:3], 6, addends[3]])),
    )
    assert optimizer.state[param]["exp_avg"].flatten().tolist() == [0.0, 4.0, 11.0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_eps_is_added_to_the_corrected_root_of_a_dense_gradient(dtype: torch.dtype) -> None:
    param = Parameter(torch.zeros(2, 1, dtype=torch.float64))
    grad = torch.full((2, 1), 2.0, dtype=dtype)
    step_with(SparseAdam([param], lr=0.1, betas=(0.9, 0.99), eps=0.5), param, grad)
    assert param[1].item() == pytest.approx(-0.1 * 2.0 / (2.0 + 0.5))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.1},
        {"weight_decay": 0.1, "decoupled_weight_decay": True},
        {"amsgrad": True},
        {"maximize": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_dense_gradient_steps_as_under_fused_adam(dtype: torch.dtype, options: dict[str, Any]) -> None:
    ours = [table(7, 5, dtype=dtype), table(3, dtype=dtype), table(2, 2, 2, dtype=dtype)]
    theirs = [copy_of(param) for param in ours]
    optimizer, reference = SparseAdam(ours, **options), torch.optim.Adam(theirs, fused=True, **options)
    for _ in range(20):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = other.grad = torch.randn_like(one)
        optimizer.step()
        reference.step()
    for one, other in zip(ours, theirs, strict=True):
        assert same_bits(one, other)
        assert optimizer.state[one].keys() == reference.state[other].keys()
        for key, value in reference.state[other].items():
            assert torch.equal(optimizer.state[one][key], value)

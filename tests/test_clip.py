"""Clipping gradients of which some are sparse: as torch clips the same gradients made dense."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import Embedding, Parameter

from gradients import copy_of, entries_of, rows_of, sparse, table
from rowstep import clip_grad_norm_, clip_grad_value_

pytestmark = pytest.mark.usefixtures("backend")


def mixed_and_dense(dtype: torch.dtype = torch.float32) -> tuple[list[Parameter], list[Parameter]]:
    """A model with sparse and dense gradients, and one with the same gradients, all dense."""
    params = [table(30, 4, dtype=dtype), table(6, 5, 2, dtype=dtype), table(7, dtype=dtype), table(3, dtype=dtype)]
    params[0].grad = rows_of(params[0], torch.randint(30, (70,)))
    params[1].grad = entries_of(params[1], 20, 2)
    params[2].grad = torch.randn(7).to(dtype)
    twins = [copy_of(param) for param in params]
    for param, twin in zip(params, twins, strict=True):
        twin.grad = None if param.grad is None else param.grad.to_dense().clone()
    return params, twins


def assert_same_gradients(params: list[Parameter], twins: list[Parameter]) -> None:
    for param, twin in zip(params, twins, strict=True):
        if twin.grad is None:
            assert param.grad is None
        else:
            assert param.grad is not None
            torch.testing.assert_close(param.grad.to_dense(), twin.grad)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, 0.5, math.inf, 0.0, -1.0, -math.inf])
@pytest.mark.parametrize("max_norm", [0.1, 1e6])
def test_the_norm_and_the_clipped_gradients_are_torchs(norm_type: float, max_norm: float) -> None:
    params, twins = mixed_and_dense()
    norm = clip_grad_norm_(params, max_norm, norm_type)
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(twins, max_norm, norm_type))
    assert_same_gradients(params, twins)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    params, twins = mixed_and_dense(dtype)
    truth = torch.cat([twin.grad.double().flatten() for twin in twins if twin.grad is not None]).norm()
    assert float(clip_grad_norm_(params, 0.5)) == pytest.approx(
        float(truth), rel=1e-2 if dtype == torch.bfloat16 else 1e-12
    )


def test_the_norm_is_of_what_duplicates_sum_to() -> None:
    param = table(4, 1)
    param.grad = rows_of(param, [2, 2, 2], torch.tensor([[3.0], [-1.0], [2.0]]))
    assert float(clip_grad_norm_(param, 2.0)) == 4.0
    assert param.grad._values().flatten().tolist() == pytest.approx([1.5, -0.5, 1.0])


def test_a_gradient_stays_as_sparse_as_it_was() -> None:
    param = table(10, 3)
    param.grad = grad = rows_of(param, [1, 7, 1])
    clip_grad_norm_([param], 1e-3)
    assert param.grad is grad
    assert grad._nnz() == 3
    assert not grad.is_coalesced()


def test_values_that_two_gradients_share_are_scaled_once() -> None:
    left, right = Embedding(5, 2, sparse=True), Embedding(5, 2, sparse=True)
    ids = torch.tensor([1, 3])
    ((left(ids) + right(ids)) * torch.tensor([3.0, 4.0])).sum().backward()
    before = left.weight.grad
    assert before is not None
    full = before.to_dense()
    norm = clip_grad_norm_([left.weight, right.weight], 1.0)
    for module in (left, right):
        assert module.weight.grad is not None
        torch.testing.assert_close(module.weight.grad.to_dense(), full / (norm + 1e-6))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_norm_that_is_not_finite(bad: float) -> None:
    params, twins = mixed_and_dense()
    for these in (params, twins):
        assert these[2].grad is not None
        these[2].grad[0] = bad
    with pytest.raises(RuntimeError, match=r"norm of order 2\.0 .* (nan|inf).*error_if_nonfinite=False"):
        clip_grad_norm_(params, 1.0, error_if_nonfinite=True)
    norm = clip_grad_norm_(params, 1.0)
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(twins, 1.0), equal_nan=True)


def test_nothing_to_clip() -> None:
    assert float(clip_grad_norm_([table(3, 2)], 1.0)) == 0.0
    assert float(clip_grad_norm_([], 1.0)) == 0.0
    empty = table(3, 2)
    empty.grad = rows_of(empty, [])
    assert float(clip_grad_norm_(iter([empty]), 1.0)) == 0.0


def test_an_index_outside_the_table_is_an_error() -> None:
    param = table(4, 2)
    param.grad = sparse([[1, 9]], torch.ones(2, 2), (4, 2), checked=False)
    with pytest.raises(IndexError, match="index 9 in dimension 0; expected 0 <= index < 4"):
        clip_grad_norm_(param, 1.0)


def test_many_threads_find_the_same_norm() -> None:
    param = table(5000, 64)
    param.grad = rows_of(param, torch.randint(5000, (6000,)))
    norms: list[Tensor] = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        norms.append(clip_grad_norm_(param, 1e9))
    torch.testing.assert_close(norms[1], norms[0])
    torch.testing.assert_close(norms[2], norms[0])
    torch.testing.assert_close(norms[0], param.grad.to_dense().norm())


def test_values_are_clamped_as_torch_clamps_the_sums() -> None:
    params, twins = mixed_and_dense()
    clip_grad_value_(params, 0.7)
    torch.nn.utils.clip_grad_value_(twins, 0.7)
    assert_same_gradients(params, twins)
    assert params[0].grad is not None
    assert params[0].grad.is_sparse

"""Clipping gradients of which some are sparse: as torch clips the same gradients made dense."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from rowstep import clip_grad_norm_, clip_grad_value_
from tests.helpers.gradients import copy_of, entries_of, rows_of, sparse, table

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


NORM_TYPES = (2.0, 1.0, 3.0, 0.5, math.inf, 0.0, -0.5, -1.0, -2.0, -math.inf, math.nan, 1e-3, -1e-3, 40.0, -40.0)


@pytest.mark.parametrize(
    ("norm_type", "max_norm"),
    [*((norm_type, 0.1) for norm_type in NORM_TYPES), *((2.0, limit) for limit in (1e6, 0.0, math.inf, math.nan))],
)
def test_the_norm_and_the_clipped_gradients_are_torchs(norm_type: float, max_norm: float) -> None:
    params, twins = mixed_and_dense(torch.float64)
    norm = clip_grad_norm_(params, max_norm, norm_type)
    expected = torch.nn.utils.clip_grad_norm_(twins, max_norm, norm_type)
    torch.testing.assert_close(norm, expected, equal_nan=True)
    if not math.isnan(max_norm / (float(expected) + 1e-6)):  # NaN times what a sparse gradient does not name is 0
        assert_same_gradients(params, twins)


def tensors_for_norms() -> dict[str, list[Tensor]]:
    nan, inf = math.nan, math.inf
    return {
        "with zeros": [torch.tensor([[1.0], [0.0], [3.0]])],
        "zeros": [torch.zeros(3, 1)],
        "two": [torch.tensor([[2.0], [2.0]]), torch.tensor([[3.0, 1.0]])],
        "three, one of them 0": [torch.tensor([[2.0], [2.0]]), torch.tensor([[3.0, 1.0]]), torch.zeros(2, 2)],
        "NaN": [torch.tensor([[nan], [0.0], [2.0]])],
        "NaN elsewhere": [torch.tensor([[2.0], [2.0]]), torch.tensor([[nan], [1.0]])],
        "inf": [torch.tensor([[inf], [1.0], [0.0]])],
        "-inf and NaN": [torch.tensor([[-inf], [1.0]]), torch.tensor([[nan], [0.0]])],
        "without columns": [torch.ones(2, 1), torch.ones(3, 0)],
    }


@pytest.mark.parametrize("case", tensors_for_norms())
def test_any_mix_of_layouts_has_torchs_norm(case: str) -> None:
    """Each tensor once dense, once sparse in all rows, once in those that are not 0: all mixes."""
    tensors = [tensor.double() for tensor in tensors_for_norms()[case]]
    empty = case == "without columns"
    norm_types = (2.0, 1.0, 0.5, math.inf, 0.0, -1.0, -math.inf, -40.0)
    for norm_type, layouts in itertools.product(norm_types, itertools.product("dan", repeat=len(tensors))):
        if empty and (norm_type < 0 or layouts[-1] == "d"):
            continue  # torch raises, and so does ours: there is no least number of none
        if empty and norm_type == math.inf:
            expected = torch.tensor(1.0, dtype=torch.float64)  # torch raises
        else:
            expected = torch.nn.utils.get_total_norm(tensors, norm_type)
        params = [table(*tensor.shape, dtype=torch.float64) for tensor in tensors]
        for param, tensor, layout in zip(params, tensors, layouts, strict=True):
            rows = tensor.ne(0).any(1).nonzero()[:, 0] if layout == "n" else torch.arange(len(tensor))
            param.grad = tensor.clone() if layout == "d" else rows_of(param, rows, tensor[rows])
        torch.testing.assert_close(clip_grad_norm_(params, 1e30, norm_type), expected, equal_nan=True)


@pytest.mark.parametrize("power", [-1.0, -math.inf])
def test_the_least_number_of_nothing(power: float) -> None:
    param = table(3, 0)
    param.grad = rows_of(param, [1])
    with pytest.raises(RuntimeError, match=r"cannot compute the .* norm"):
        clip_grad_norm_(param, 1.0, power)


@pytest.mark.parametrize("norm_type", [1e-3, 5e-324, 1e3, 1e308])
def test_a_norm_beyond_the_numbers_there_are_is_infinite(norm_type: float) -> None:
    param = table(4, 2)
    param.grad = rows_of(param, [0, 1, 1], 1e30)
    assert float(clip_grad_norm_(param, 1e30, norm_type)) == math.inf


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


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_many_threads_find_a_norm_that_is_not_finite(bad: float) -> None:
    torch.set_num_threads(2)
    param = table(5000, 64)
    values = torch.randn(6000, 64)
    values[17, 3] = bad
    param.grad = rows_of(param, torch.randint(5000, (6000,)), values)
    norm = clip_grad_norm_(param, 1.0)
    torch.testing.assert_close(norm, torch.tensor(bad), equal_nan=True)


def test_nothing_to_clip() -> None:
    assert float(clip_grad_norm_([table(3, 2)], 1.0)) == 0.0
    assert float(clip_grad_norm_([], 1.0)) == 0.0
    empty = table(3, 2)
    empty.grad = rows_of(empty, [])
    assert float(clip_grad_norm_(iter([empty]), 1.0)) == 0.0


@pytest.mark.parametrize("norm_type", [2.0, 3.0, math.inf])
@pytest.mark.parametrize("rows", [5000, 900])
def test_many_threads_find_the_same_norm(backend: str, rows: int, norm_type: float) -> None:
    if backend == "triton":
        pytest.skip("its programs are no threads")
    param = table(rows, 64, dtype=torch.float64)
    param.grad = rows_of(param, torch.randint(rows, (6000,)))
    norms: list[Tensor] = []
    for threads in (1, 2, 3, 5):
        torch.set_num_threads(threads)
        norms.append(clip_grad_norm_(param, 1e9, norm_type))
    torch.testing.assert_close(norms[0], param.grad.to_dense().norm(norm_type))
    tolerance = 0.0 if backend == "numba" else 1e-14  # torch's own sums depend on the number of threads
    for norm in norms[1:]:
        torch.testing.assert_close(norm, norms[0], rtol=tolerance, atol=0)


def test_values_are_clamped_as_torch_clamps_the_sums() -> None:
    params, twins = mixed_and_dense()
    clip_grad_value_(params, 0.7)
    torch.nn.utils.clip_grad_value_(twins, 0.7)
    assert_same_gradients(params, twins)
    assert params[0].grad is not None
    assert params[0].grad.is_sparse


def clamped_alone(grad: Tensor, clip_value: float) -> Tensor:
    """The gradient after clipping by value, where its parameter is the only one."""
    param = Parameter(torch.zeros(grad.shape, dtype=grad.dtype))
    param.grad = grad
    clip_grad_value_(param, clip_value)
    assert param.grad is grad
    assert grad.is_sparse
    assert grad.is_coalesced()
    return grad.to_dense()


@pytest.mark.parametrize(
    ("clip_value", "sparse_dim", "count"),
    [(1, 0, 40), (0, 1, 40), (0.25, 1, 40), (0.25, 2, 40), (math.inf, 3, 40), (10**30, 1, 1), (0.25, 1, 0)],
)
def test_a_sparse_gradient_alone_is_clamped(clip_value: float, sparse_dim: int, count: int) -> None:
    grad = entries_of(table(3, 2, 2), count, sparse_dim)
    full = grad.to_dense().clone()
    torch.testing.assert_close(clamped_alone(grad, clip_value), full.clamp(-float(clip_value), float(clip_value)))


def test_one_that_claims_to_be_coalesced_is_not_believed() -> None:
    indices, values = torch.tensor([[2, 0, 2]]), torch.tensor([[5.0], [0.5], [-4.5]])
    grad = torch.sparse_coo_tensor(indices, values, (3, 1), is_coalesced=True, check_invariants=False)
    assert clamped_alone(grad, 1.0).flatten().tolist() == [0.5, 0.0, 0.5]
    assert grad.indices().tolist() == [[0, 2]]


@pytest.mark.parametrize(("dtype", "ones"), [(torch.bfloat16, 1000), (torch.float16, 70_000)])
def test_16_bit_duplicates_are_summed_before_they_are_rounded(dtype: torch.dtype, ones: int) -> None:
    param = table(2, 1, dtype=dtype)
    values = torch.ones(ones, 1, dtype=dtype)
    assert clamped_alone(rows_of(param, [1] * ones, values), 600.0).tolist() == [[0.0], [600.0]]


def test_clamping_where_there_is_nothing_or_only_dense() -> None:
    clip_grad_value_([], 1.0)
    clip_grad_value_(iter([table(3), table(2, 2)]), 1.0)
    param = table(3)
    param.grad = torch.tensor([-2.0, 0.5, 2.0])
    clip_grad_value_((p for p in [table(2), param]), 1.0, foreach=True)
    assert param.grad.tolist() == [-1.0, 0.5, 1.0]
    clip_grad_value_(param, -0.25)  # as torch, for what it is worth
    assert param.grad.tolist() == [-0.25] * 3


@pytest.mark.parametrize("clip_value", [-1.0, math.nan])
def test_a_range_without_0_cannot_be_kept_by_a_sparse_gradient(clip_value: float) -> None:
    params, twins = mixed_and_dense()
    with pytest.raises(ValueError, match=f"Invalid clip_value: {clip_value}; expected >= 0"):
        clip_grad_value_(params, clip_value)
    assert_same_gradients(params, twins)


def test_programs_may_put_them_in_the_place_of_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    params, twins = mixed_and_dense()
    torch.nn.utils.clip_grad_norm_(twins, 0.5)
    torch.nn.utils.clip_grad_value_(twins, 0.01)
    for module in (torch.nn.utils, torch.nn.utils.clip_grad):
        monkeypatch.setattr(module, "clip_grad_norm_", clip_grad_norm_)
        monkeypatch.setattr(module, "clip_grad_value_", clip_grad_value_)
    torch.nn.utils.clip_grad_norm_(params, 0.5)
    torch.nn.utils.clip_grad_value_(params, 0.01)
    assert_same_gradients(params, twins)


def test_gradients_of_several_dtypes() -> None:
    params, twins = mixed_and_dense()
    more, more_twins = mixed_and_dense(torch.float64)
    norm = clip_grad_norm_([*params, *more], 0.5)
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_([*twins, *more_twins], 0.5))
    clip_grad_value_([*params, *more], 0.01)
    torch.nn.utils.clip_grad_value_([*twins, *more_twins], 0.01)
    assert_same_gradients([*params, *more], [*twins, *more_twins])


def test_an_index_outside_the_table_leaves_every_gradient_as_it_was(backend: str) -> None:
    if backend == "triton":
        pytest.skip("on a GPU the step says so, as tests/gpu/test_clip.py has it")
    params, twins = mixed_and_dense()
    wrong = table(4, 2)
    wrong.grad = sparse([[1, -1]], torch.ones(2, 2), (4, 2), checked=False)
    for clip in (clip_grad_norm_, clip_grad_value_):
        with pytest.raises(IndexError, match="index -1 in dimension 0; expected 0 <= index < 4"):
            clip([*params, wrong], 0.1)
        assert_same_gradients(params, twins)

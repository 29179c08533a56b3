"""The kernels of a step compute what the reference says, for everything that a table can keep."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from rowstep import SparseAdam
from tests.helpers import interpreter as interpreter  # skips, without Triton
from tests.helpers.gradients import same_bits, set_grad, sparse, table

OPTIONS: list[dict[str, Any]] = [
    {},
    {"amsgrad": True},
    {"bias_correction": "row"},
    {"weight_decay": 0.1, "maximize": True},
    {"weight_decay": 2.0, "decoupled_weight_decay": True},
    {"weight_decay": 0.1, "amsgrad": True, "bias_correction": "row", "nonfinite": "skip", "maximize": True},
    {"second_moment": "row"},
    {"second_moment": "row", "betas": (0.0, 0.9), "nonfinite": "skip"},
    {"second_moment": "row", "weight_decay": 0.1, "maximize": True, "bias_correction": "row"},
]

ROUNDED: list[dict[str, Any]] = [
    {"state_dtype": torch.bfloat16},
    {"state_dtype": torch.bfloat16, "amsgrad": True},
    {"state_dtype": torch.bfloat16, "second_moment": "row", "weight_decay": 0.1},
]

Run = dict[str, Tensor]


def gradients(param: Tensor, steps: int, count: int = 6, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Gradients with few rows that come often, now and then large, and once not finite."""
    found = []
    for step in range(steps):
        ids = (torch.rand(count) ** 2 * len(param)).long()
        values = torch.randn(count, *param.shape[1:], dtype=torch.float64) * (1 + 5 * (step % 4 == 0))
        if step == 3:
            values[0, -1] = torch.inf
        found.append(sparse(ids.unsqueeze(0), values.to(dtype or param.dtype), param.shape))
    return found


def run(backend: str, start: Tensor, grads: list[Tensor], **options: Any) -> Run:
    """Weights and state after steps with these gradients."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("ROWSTEP_BACKEND", backend)
        param = Parameter(start.detach().clone())
        optimizer = SparseAdam([param], lr=0.01, **options)
        for grad in grads:
            set_grad(param, grad)
            optimizer.step()
        state = {key: torch.as_tensor(value) for key, value in optimizer.state[param].items()}
        return {"p": param.detach(), "skipped": torch.tensor(optimizer.skipped_rows), **state}


def assert_agree(one: Run, other: Run, bar: float) -> None:
    assert one.keys() == other.keys()
    for key, value in other.items():
        torch.testing.assert_close(one[key], value, rtol=bar, atol=bar, equal_nan=True)


@pytest.mark.parametrize(("dtype", "bar"), [(torch.float64, 1e-12), (torch.float32, 2e-6)], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_option_agrees_with_the_reference_over_50_steps(
    options: dict[str, Any], dtype: torch.dtype, bar: float
) -> None:
    start = table(9, 3, dtype=dtype)
    grads = gradients(start, 50)
    assert_agree(run("triton", start, grads, **options), run("reference", start, grads, **options), bar)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        *((torch.float32, options) for options in ROUNDED),
        (torch.bfloat16, {}),
        (torch.bfloat16, {"stochastic_rounding": True}),
        (torch.bfloat16, {"stochastic_rounding": True, "state_dtype": torch.bfloat16}),
    ],
    ids=str,
)
def test_16_bits_are_rounded_by_the_bits_of_the_reference(dtype: torch.dtype, options: dict[str, Any]) -> None:
    start = table(9, 3, dtype=dtype)
    grads = gradients(start, 12)
    ours, theirs = (run(backend, start, grads, seed=5, **options) for backend in ("triton", "reference"))
    for key in ours:
        # What is rounded may differ by float32's own rounding, and then falls on another neighbour now and then.
        is_rounded = ours[key].dtype is torch.bfloat16
        if is_rounded:
            assert ((ours[key] == theirs[key]) | theirs[key].isnan()).float().mean() > 0.95, key
        torch.testing.assert_close(ours[key], theirs[key], rtol=2e-2 if is_rounded else 2e-6, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float64], ids=str)
def test_a_gradient_may_have_another_dtype_than_its_table(grad_dtype: torch.dtype) -> None:
    start = table(9, 3)
    grads = gradients(start, 3, dtype=grad_dtype)
    assert_agree(run("triton", start, grads), run("reference", start, grads), 2e-6)


@pytest.mark.parametrize("options", [{}, {"second_moment": "row", "nonfinite": "skip", "weight_decay": 0.1}], ids=str)
@pytest.mark.parametrize(("columns", "count"), [(3, 200), (1500, 5), (1500, 130), (1, 3)])
def test_long_runs_and_wide_rows(columns: int, count: int, options: dict[str, Any]) -> None:
    """Runs of more than a chunk, which begin and end inside of others, and rows of more than a block."""
    start = table(3, columns, dtype=torch.float64)
    grads = gradients(start, 1, count)
    ours = run("triton", start, grads, **options)
    assert_agree(ours, run("reference", start, grads, **options), 1e-12)
    again = run("triton", start, grads, **options)
    assert all(same_bits(value, again[key]) for key, value in ours.items())


def test_short_runs_are_summed_in_order_of_occurrence() -> None:
    # In any other order a 1 meets the large number first and is lost: in float32, 2**25 + 1 is 2**25.
    param = Parameter(torch.zeros(3, 1))
    values = torch.tensor([[2.0**25], [5], [-(2.0**25)], [1], [6], [3]])
    param.grad = sparse([[1, 2, 1, 1, 2, 1]], values, param.shape)
    optimizer = SparseAdam([param], betas=(0.0, 0.0))
    optimizer.step()
    assert optimizer.state[param]["exp_avg"].flatten().tolist() == [0.0, 4.0, 11.0]


@pytest.mark.parametrize(("before", "run"), [(62, 9), (64, 63), (3, 64 * 6 + 10), (64, 64 * 5)])
def test_whole_chunks_of_a_run_are_summed_first_and_all_else_in_order(before: int, run: int) -> None:
    param = Parameter(torch.zeros(3, 2))
    numbers = torch.randn(before + run + 70, 2)
    ids = torch.tensor([0] * before + [1] * run + [2] * 70)
    param.grad = sparse(ids.unsqueeze(0), numbers, param.shape)
    optimizer = SparseAdam([param], betas=(0.0, 0.0))
    optimizer.step()
    expected, at, end = torch.zeros(2), before, before + run
    while at < end:
        is_whole = at % 64 == 0 and at + 64 <= end
        some = torch.zeros(2)
        for row in numbers[at : at + (64 if is_whole else 1)]:
            some = some + row
        expected, at = expected + some, at + (64 if is_whole else 1)
    assert torch.equal(optimizer.state[param]["exp_avg"][1], expected)


def test_values_may_have_any_strides() -> None:
    """Those of ``sum().backward()`` are one number, repeated by strides of 0."""
    param = table(5, 4)
    ids = torch.tensor([[1, 3, 1]])
    for values in (torch.ones(1).expand(3, 4), torch.randn(4, 3).t(), torch.randn(3, 8)[:, ::2]):
        start = param.detach().clone()
        grads = [sparse(ids, values, param.shape)]
        assert_agree(run("triton", start, grads), run("reference", start, grads), 2e-6)


class TestLeftToTheReference:
    """A table that the kernels do not take, and a gradient."""

    def stepped(self, param: Tensor, grad: Tensor, **options: Any) -> list[Any]:
        optimizer = SparseAdam([param], **options)
        for _ in range(2):
            param.grad = grad
            optimizer.step()
        return [known.kernels for known in optimizer._tables.values()]

    def test_of_float16(self) -> None:
        param = table(5, 3, dtype=torch.float16)
        before = param.detach().clone()
        assert self.stepped(param, sparse([[1]], torch.ones(1, 3).half(), param.shape)) == [None]
        assert (param != before).any(1).tolist() == [False, True, False, False, False]

    def test_with_strides_of_its_own(self) -> None:
        param = Parameter(torch.randn(3, 5).t())
        before = param.detach().clone()
        assert self.stepped(param, sparse([[1]], torch.ones(1, 3), param.shape)) == [None]
        assert (param != before).any(1).tolist() == [False, True, False, False, False]

    def test_a_gradient_of_single_elements(self) -> None:
        param = table(5, 3)
        before = param.detach().clone()
        self.stepped(param, sparse([[1], [2]], torch.ones(1), param.shape))
        assert (param != before).nonzero().tolist() == [[1, 2]]

    def test_without_entries(self) -> None:
        param = table(5, 3)
        before = param.detach().clone()
        self.stepped(param, sparse(torch.zeros(1, 0, dtype=torch.int64), torch.ones(0, 3), param.shape))
        assert torch.equal(param, before)

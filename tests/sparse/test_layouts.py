"""Parameters and states that do not lie in memory one row after the other: strides, offsets, views, swapped data."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from rowstep import SparseAdam
from tests.helpers.gradients import rows_of, same_bits, sparse, step_with, table

pytestmark = pytest.mark.usefixtures("backend")


def transposed(dense: Tensor) -> Tensor:
    return dense.t().contiguous().t()


def every_second_column(dense: Tensor) -> Tensor:
    return torch.randn(len(dense), 2 * dense.shape[1])[:, ::2].copy_(dense)


def columns_of_a_wider_table(dense: Tensor) -> Tensor:
    return torch.randn(len(dense), dense.shape[1] + 5)[:, 2 : 2 + dense.shape[1]].copy_(dense)


def rows_of_a_longer_table(dense: Tensor) -> Tensor:
    return torch.randn(len(dense) + 5, dense.shape[1])[3 : 3 + len(dense)].copy_(dense)


LAYOUTS = [transposed, every_second_column, columns_of_a_wider_table, rows_of_a_longer_table]


def assert_same_steps(param: Parameter, twin: Parameter, optimizer: SparseAdam, reference: SparseAdam) -> None:
    """Three sparse and two dense steps of both give the same numbers."""
    for step in range(5):
        grad = rows_of(twin, torch.randint(len(twin), (9,)))
        if step > 2:
            grad = torch.randn(twin.shape)
        step_with(optimizer, param, grad)
        step_with(reference, twin, grad)
        torch.testing.assert_close(param, twin, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(optimizer.state[param]["exp_avg_sq"], reference.state[twin]["exp_avg_sq"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_parameter_may_have_any_strides(layout: Callable[[Tensor], Tensor]) -> None:
    twin = table(20, 4)
    param = Parameter(layout(twin.detach()))
    assert layout is rows_of_a_longer_table or not param.is_contiguous()
    memory = torch.empty(0).set_(param.untyped_storage())
    expected = memory.clone()
    assert_same_steps(param, twin, SparseAdam([param]), SparseAdam([twin]))
    # What lies between and around the parameter's numbers was not written.
    expected.as_strided(param.shape, param.stride(), param.storage_offset()).copy_(param.detach())
    assert same_bits(memory, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_state_may_have_other_strides_than_its_parameter(layout: Callable[[Tensor], Tensor]) -> None:
    param, twin = table(20, 4), table(20, 4)
    twin.data.copy_(param.data)
    optimizer, reference = SparseAdam([param], amsgrad=True), SparseAdam([twin], amsgrad=True)
    grad = rows_of(param, [1, 2, 19])
    step_with(optimizer, param, grad)
    step_with(reference, twin, grad)
    saved = optimizer.state_dict()
    for key in saved["state"][0].keys() - {"step"}:
        saved["state"][0][key] = layout(saved["state"][0][key])
    optimizer.load_state_dict(saved)
    assert_same_steps(param, twin, optimizer, reference)


def test_a_one_element_gradient_of_a_view_with_an_offset() -> None:
    # dense_dim 0 and one distinct index: torch.optim.SparseAdam writes to the wrong address here.
    memory = torch.zeros(64)
    param = Parameter(memory[40:48])
    optimizer = SparseAdam([param], lr=0.5)
    step_with(optimizer, param, sparse([[3, 3]], torch.tensor([1.0, 1.0]), (8,)))
    assert memory.nonzero().tolist() == [[43]]
    assert param[3].item() == pytest.approx(-0.5)

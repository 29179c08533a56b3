"""Tensors that look like others and are not: negated, zero without memory, expanded, freed, wrapped, fake."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import Parameter

from rowstep import DeferredAdam, SparseAdam, clip_grad_norm_, clip_grad_value_, select_rows_
from tests.helpers.gradients import Snapshot, rows_of, sparse, step_with, table

pytestmark = pytest.mark.usefixtures("backend")

OPTIMIZERS: list[Any] = [SparseAdam, DeferredAdam]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_negated_parameter(optimizer: Any) -> None:
    param = Parameter(torch.tensor([0 + 1j]).conj().imag)
    assert param.is_neg()
    step_with(optimizer([param], lr=0.1), param, sparse([[0]], torch.ones(1), (1,)))
    assert param.item() == pytest.approx(-1.1)


@pytest.mark.parametrize("options", [{}, {"force_sparse": True}], ids=str)
@pytest.mark.parametrize("grad", [torch._neg_view(torch.full((6, 4), -1.0)), torch._efficientzerotensor((6, 4))])
def test_a_dense_gradient_of_an_odd_kind(grad: torch.Tensor, options: dict[str, Any]) -> None:
    params = [table(6, 4), table(6, 4)]
    params[1].data.copy_(params[0].data)
    for param, each in zip(params, (grad, grad.clone() + 0), strict=True):
        optimizer = SparseAdam([param], lr=0.1, **options)
        step_with(optimizer, param, rows_of(param, [1], 1.0))
        step_with(optimizer, param, each)
    assert torch.equal(params[0], params[1])


@pytest.mark.parametrize("is_sparse", [True, False])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_expanded_parameter_is_refused_with_nothing_changed(optimizer: Any, is_sparse: bool) -> None:
    params = [table(3, 2), Parameter(torch.ones(1, 4).expand(8, 4))]
    params[0].grad = rows_of(params[0], [1])
    params[1].grad = rows_of(params[1], [1, 3]) if is_sparse else torch.ones(8, 4)
    made = optimizer(params)
    before = Snapshot(made)
    with pytest.raises(
        ValueError, match=r"parameter 1 of group 0: .*strides \(0, 1\), so elements may share memory; expected"
    ):
        made.step()
    before.assert_unchanged()


@pytest.mark.parametrize("options", [{}, {"force_sparse": True}], ids=str)
def test_a_dense_gradient_whose_storage_is_freed(options: dict[str, Any]) -> None:
    params = [table(3, 2), table(6, 4)]
    params[0].grad, params[1].grad = rows_of(params[0], [1]), torch.ones(6, 4)
    params[1].grad.untyped_storage().resize_(0)
    optimizer = SparseAdam(params, **options)
    before = Snapshot(optimizer)
    with pytest.raises(
        ValueError, match="parameter 1 of group 0: the storage of the gradient is too small for its shape"
    ):
        optimizer.step()
    params[1].grad = None
    before.assert_unchanged()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_empty_parameter_at_an_offset(optimizer: Any) -> None:
    empty, other = Parameter(torch.zeros(0, 8, 2)[..., 1]), table(3, 2)
    assert empty.storage_offset() == 1
    empty.grad, other.grad = torch.zeros(0, 8), rows_of(other, [1])
    made = optimizer([empty, other], lr=0.1)
    before = other.detach().clone()
    made.step()
    assert not torch.equal(other, before)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_square_table_that_is_transposed_in_place(optimizer: Any) -> None:
    """It keeps its address, shape and memory."""
    params = [Parameter(torch.arange(16.0).reshape(4, 4)) for _ in range(2)]
    made = optimizer([params[0]], lr=0.1)
    twin = (torch.optim.SparseAdam if optimizer is SparseAdam else torch.optim.Adam)([params[1]], lr=0.1)
    for rows in ([0, 2], [0, 1], [1]):
        for param, each in ((params[0], made), (params[1], twin)):
            grad = rows_of(param, rows, 1.0)
            step_with(each, param, grad.to_dense() if isinstance(each, torch.optim.Adam) else grad)
            param.data = param.data.t()
    assert torch.allclose(params[0], params[1])


def test_a_parameter_that_wraps_others_has_no_address() -> None:
    two = pytest.importorskip("torch.testing._internal.two_tensor").TwoTensor
    params: list[Any] = [Parameter(two(torch.zeros(10, 4), torch.zeros(10, 4))), Parameter(torch.zeros(10, 4))]
    for param in params:
        optimizer = SparseAdam([param], lr=0.1)
        step_with(optimizer, param, rows_of(param, [1, 2]))
    assert torch.equal(params[0].a != 0, params[1] != 0)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_fake_gradients_have_no_address() -> None:
    """Their ids cannot be checked, so torch says that it would need their numbers."""
    fake_tensor = pytest.importorskip("torch._subclasses.fake_tensor")
    with fake_tensor.FakeTensorMode():
        param = Parameter(torch.zeros(10, 4))
        param.grad = sparse(torch.zeros(1, 2, dtype=torch.int64), torch.ones(2, 4), (10, 4), checked=False)
        with pytest.raises(fake_tensor.DataDependentOutputException):
            SparseAdam([param]).step()


@pytest.mark.parametrize("shape", [(0, 3), (5, 0)])
def test_a_table_without_numbers_turns_to_a_moment_per_row(shape: tuple[int, int]) -> None:
    param = Parameter(torch.zeros(shape))
    optimizer = SparseAdam([param])
    step_with(optimizer, param, rows_of(param, []))
    optimizer.param_groups[0]["second_moment"] = "row"
    with pytest.warns(UserWarning, match="state converted"):
        step_with(optimizer, param, rows_of(param, []))
    assert torch.equal(optimizer.state[param]["exp_avg_sq_row"], torch.zeros(shape[0]))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_what_is_made_lies_beside_the_table_whatever_the_default_device_is(optimizer: Any) -> None:
    """``torch.set_default_device`` with the device of the model, and tables in host memory."""
    params = [table(6, 2), table(6, 2), table(6, 2)]
    made, grads, rows = optimizer(params[:2]), [rows_of(param, [1, 4, 1]) for param in params], torch.tensor([1, 3])
    params[2].grad = torch.ones(6, 2)
    torch.set_default_device("meta")
    try:
        for clip in (clip_grad_norm_, clip_grad_value_):
            for param, grad in zip(params[:2], grads, strict=False):
                param.grad = grad
            clip(params[:2], 0.1)
            made.step()
        select_rows_(params[2], rows)
        made.state_dict()
        allocated = optimizer(params[2:])
        allocated.allocate_state()
    finally:
        torch.set_default_device(None)
    assert all(param.grad is not None and param.grad.is_cpu for param in params)
    states = [*made.state.values(), *allocated.state.values()]
    assert all(slot.is_cpu for state in states for slot in state.values() if isinstance(slot, torch.Tensor))
    assert [int(state["step"]) for state in states] == [2, 2, 0]

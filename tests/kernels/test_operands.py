"""Nothing goes to a kernel by its address unchecked: what is wrong is refused, and nothing changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from rowstep import DeferredAdam, SparseAdam, clip_grad_norm_
from tests.helpers.deferred_cases import embedding, in_memory
from tests.helpers.gradients import Snapshot, rows_of, step_with, table

pytestmark = pytest.mark.usefixtures("backend")

OPTIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "by element": (SparseAdam, {"amsgrad": True, "bias_correction": "row"}),
    "by row": (SparseAdam, {"second_moment": "row"}),
    "deferred": (DeferredAdam, {"amsgrad": True}),
}
SLOTS = {
    "by element": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "row_step"),
    "by row": ("exp_avg", "exp_avg_sq_row"),
    "deferred": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
}
REPLACED: dict[str, Callable[[Tensor], Tensor]] = {
    "shorter": lambda tensor: tensor[:-1].clone(),
    "longer": lambda tensor: torch.cat([tensor, tensor]),
    "of integers": lambda tensor: tensor.to(torch.int16),
    "of more dimensions": lambda tensor: tensor.unsqueeze(0),
}
RESIZED: dict[str, Callable[[Tensor], int]] = {"freed": lambda tensor: 0, "smaller": lambda tensor: tensor.nbytes - 1}


def stepped(name: str) -> tuple[Any, list[Parameter]]:
    """An optimizer of two tables, each with a gradient for another step; the second is the one to spoil."""
    cls, options = OPTIONS[name]
    params = [table(6, 4), table(6, 4)]
    optimizer = cls(params, **options)
    for _ in range(2):
        for param in params:
            if isinstance(optimizer, DeferredAdam) and optimizer.state:
                optimizer.catch_up(param, torch.tensor([1, 5]))
            param.grad = rows_of(param, [1, 5, 1])
        if not optimizer.state:
            optimizer.step()
    return optimizer, params


def resize(tensor: Tensor, byte_count: int) -> None:
    with torch._C.DisableTorchFunctionSubclass():  # else waiting rows would catch up first
        tensor.untyped_storage().resize_(byte_count)


@pytest.mark.parametrize("way", REPLACED)
@pytest.mark.parametrize(("name", "slot"), [("by element", "row_step"), ("by row", "exp_avg_sq_row")])
def test_a_state_per_row_that_was_edited_by_hand(name: str, slot: str, way: str) -> None:
    """Moments of every element are in state/test_untrusted.py."""
    optimizer, (_, param) = stepped(name)
    optimizer.state[param][slot] = REPLACED[way](optimizer.state[param][slot])
    before = Snapshot(optimizer)
    with pytest.raises((TypeError, ValueError), match=r"parameter 1 of group 0: .*expected"):
        optimizer.step()
    before.assert_unchanged()


@pytest.mark.parametrize("way", RESIZED)
@pytest.mark.parametrize(
    ("name", "slot"), [(name, slot) for name, slots in SLOTS.items() for slot in ("param", *slots)]
)
def test_a_storage_that_was_resized(name: str, slot: str, way: str) -> None:
    """As sharding packages do between a step and the next."""
    optimizer, (param, spoilt) = stepped(name)
    tensor = spoilt if slot == "param" else optimizer.state[spoilt][slot]
    resize(tensor, RESIZED[way](tensor))
    before = in_memory(param)
    with pytest.raises(ValueError, match=r"parameter 1 of group 0: .*(too small for its shape|expected)"):
        optimizer.step()
    assert torch.equal(in_memory(param), before)
    assert [int(optimizer.state[each]["step"]) for each in (param, spoilt)] == [1, 1]
    if isinstance(optimizer, DeferredAdam):
        optimizer._tables.pop(id(spoilt)).pending.release()  # else its rows would catch up when it is dropped


CHANGED: dict[str, Callable[[Tensor], object]] = {
    "resize_": lambda tensor: tensor.resize_(tensor.numel() // 2),
    "unsqueeze_": lambda tensor: tensor.unsqueeze_(0),
    "data of another dtype": lambda tensor: setattr(tensor, "data", tensor.data.view(torch.int32)),
    "data of another shape": lambda tensor: setattr(tensor, "data", tensor.data[None]),
}


@pytest.mark.parametrize("is_seen", [True, False])
@pytest.mark.parametrize("way", CHANGED)
@pytest.mark.parametrize(
    ("name", "slot"), [(name, slot) for name, slots in SLOTS.items() for slot in slots if slot != "row_step"]
)
def test_a_slot_that_was_changed_in_place(name: str, slot: str, way: str, is_seen: bool) -> None:
    """It lies where it was, in as much memory."""
    optimizer, (_, spoilt) = stepped(name)
    if is_seen:
        CHANGED[way](optimizer.state[spoilt][slot])
    else:
        with torch._C.DisableTorchFunctionSubclass():  # else waiting rows would catch up first
            CHANGED[way](optimizer.state[spoilt][slot])
    before = Snapshot(optimizer)
    with pytest.raises((TypeError, ValueError), match=r"parameter 1 of group 0: .*expected"):
        optimizer.step()
    before.assert_unchanged()
    if isinstance(optimizer, DeferredAdam):
        optimizer._tables.pop(id(spoilt)).pending.release()  # else its rows would catch up when it is dropped


TRANSPOSED: list[Callable[[Tensor], object]] = [
    lambda tensor: tensor.t_(),
    lambda tensor: setattr(tensor, "data", tensor.data.t()),  # torch does not count it as a write
]


@pytest.mark.parametrize("transpose", TRANSPOSED, ids=["t_", "data"])
@pytest.mark.parametrize("inference", [False, True])
def test_a_square_slot_that_was_transposed_in_place(
    inference: bool, transpose: Callable[[Tensor], object], backend: str
) -> None:
    if inference and backend == "reference":
        pytest.skip("torch's own operations cannot write a state that was made in this mode outside of it")
    weights = []
    grads = [rows_of(table(4, 4), rows) for rows in ([0, 1, 3], [1, 2])]
    for cls in (SparseAdam, torch.optim.SparseAdam):
        param = table(4, 4)
        param.data.fill_(1.0)
        optimizer: Any = cls([param], lr=0.1)
        for grad in grads:
            with torch.inference_mode(inference and cls is SparseAdam):
                step_with(optimizer, param, grad.clone())
                transpose(optimizer.state[param]["exp_avg"])
        weights.append(param)
    torch.testing.assert_close(*weights)


@pytest.mark.parametrize("offset", [0, 3])
@pytest.mark.parametrize("part", ["values", "indices"])
def test_a_gradient_whose_storage_is_freed(part: str, offset: int) -> None:
    """Also one that was cut from a larger tensor: what torch says of its address then is the offset."""
    param = table(6, 4)
    optimizer = SparseAdam([param])
    step_with(optimizer, param, rows_of(param, [1]))
    before = Snapshot(optimizer)
    rows, values = torch.arange(6), torch.ones(6, 4)
    grad = torch.sparse_coo_tensor(rows[None, offset:], values[offset:], (6, 4), check_invariants=False)
    getattr(grad, f"_{part}")().untyped_storage().resize_(0)
    param.grad = grad
    for action in (optimizer.step, lambda: clip_grad_norm_([param], 1.0)):
        with pytest.raises((RuntimeError, ValueError), match="storage"):  # torch's words for indices, ours for values
            action()
    before.assert_unchanged()


def deferred(rows: int = 10) -> tuple[nn.Embedding, DeferredAdam]:
    """A table of which most rows wait."""
    module = embedding(rows, 4)
    optimizer = DeferredAdam(module, lr=0.1)
    for ids in (torch.arange(rows), *[torch.tensor([0])] * 5):
        optimizer.zero_grad()
        module(ids).square().sum().backward()
        optimizer.step()
    return module, optimizer


@pytest.mark.parametrize("rows", [4, 100_000])
@pytest.mark.parametrize(
    "read",
    [
        lambda module, optimizer: module.state_dict(),
        lambda module, optimizer: optimizer.state_dict(),
        lambda module, optimizer: module(torch.tensor([3])),
        lambda module, optimizer: optimizer.catch_up(module.weight, torch.tensor([3])),
        lambda module, optimizer: optimizer.keep_rows(module.weight, torch.tensor([0])),
    ],
    ids=["state_dict", "optimizer's state_dict", "lookup", "catch_up", "keep_rows"],
)
def test_a_table_replaced_while_rows_wait_is_an_error(read: Callable[[Any, Any], object], rows: int) -> None:
    """By something that the optimizer does not hear of; else the rows catch up first, and none waits any more."""
    module, optimizer = deferred()
    with torch._C.DisableTorchFunctionSubclass():
        module.weight.data = torch.zeros(rows, 4, dtype=torch.float64)
    expected = (
        rf"\({rows}, 4\); expected leading dimensions \(10,\), as in its state\. .*grow, keep_rows or permute_rows"
    )
    with pytest.raises(ValueError, match=expected):
        read(module, optimizer)
    assert not in_memory(module.weight).any()


def test_a_replaced_table_can_be_put_back_or_begin_anew() -> None:
    module, optimizer = deferred()
    old = module.weight.data
    module.weight.data = torch.zeros(3, 4, dtype=torch.float64)
    with pytest.raises(ValueError, match="expected leading dimensions"):
        optimizer.flush()
    module.weight.data = old
    optimizer.flush()
    module.weight.data = torch.zeros(20, 4, dtype=torch.float64)
    optimizer.state.clear()
    optimizer.zero_grad()
    module(torch.tensor([19])).sum().backward()
    optimizer.step()
    assert int(optimizer.state[module.weight]["step"]) == 1
    assert optimizer.state_dict()["state"][0]["exp_avg"].shape == (20, 4)


def test_a_table_that_is_moved_while_rows_wait_and_put_back() -> None:
    """By something that the optimizer does not hear of: rows catch up where they lie, and steps are counted on."""
    module, optimizer = deferred()
    twin: Any = copy.deepcopy(module)
    twin.sparse = False
    dense = torch.optim.Adam(twin.parameters(), lr=0.1)
    dense.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for number in range(4):
        for model, each in ((module, optimizer), (twin, dense)):
            each.zero_grad()
            model(torch.tensor([number])).square().sum().backward()
            each.step()
        if number == 1:
            with torch._C.DisableTorchFunctionSubclass():
                old, module.weight.data = module.weight.data, module.weight.data.clone()
            module(torch.tensor([7]))
            with torch._C.DisableTorchFunctionSubclass():
                module.weight.data = old.copy_(module.weight.data)
    assert int(optimizer.state_dict()["state"][0]["step"]) == int(dense.state[twin.weight]["step"])
    torch.testing.assert_close(module.weight, twin.weight, rtol=1e-13, atol=1e-13)

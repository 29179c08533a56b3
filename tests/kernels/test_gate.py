"""Nothing goes to a kernel by its address that has not been looked at: each operand wrong in each way is an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rowstep import DeferredAdam, SparseAdam, clip_grad_norm_
from rowstep._backends import LateRows, Outcome, RowUpdate, admit, admit_notes, admit_state, chosen
from rowstep._gradient import RowGradient, row_gradient
from rowstep._rules.adam import Kept, Scalars
from rowstep._schedule import Schedule
from rowstep._state import State
from tests.helpers.deferred_cases import embedding, in_memory
from tests.helpers.gradients import Snapshot, rows_of, sparse, step_with, table

pytestmark = pytest.mark.usefixtures("backend")

LEAD, SHAPE = (6,), (6, 4)
SCALARS = Scalars(0.9, 0.999, 1e-8, 0.1, per_row=True, kept=Kept(amsgrad=True))


class Given:
    """Everything that kernels take, right at first."""

    def __init__(self) -> None:
        self.param = torch.randn(SHAPE)
        self.state: State = {key: torch.rand(SHAPE) for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")}
        self.state |= {"step": 3, "row_step": torch.ones(LEAD, dtype=torch.int64)}
        self.since = torch.zeros(LEAD, dtype=torch.int32)
        self.rows, self.values = torch.tensor([1, 5, 1]), torch.randn(3, 4)
        self.schedule = Schedule((0.9, 0.999), 1e-8, amsgrad=True, step=3, tolerance=1e-9)
        self.schedule.advance(0.1, 0.0)

    def gradient(self) -> RowGradient:
        return RowGradient(self.rows, self.values, LEAD, LEAD[0], SHAPE[1])

    def set(self, name: str, tensor: Any) -> None:
        if name in self.state:
            self.state[name] = tensor
        else:
            setattr(self, name, tensor)

    def get(self, name: str) -> Tensor:
        tensor: Tensor = self.state[name] if name in self.state else getattr(self, name)
        return tensor


def update_of(given: Given, *, notes: bool = False) -> RowUpdate:
    at = admit_state(given.param, given.state)
    return admit(
        given.param, given.state, given.gradient(), at, SCALARS, admit_notes(given.since, LEAD, 1) if notes else None
    )


def late(given: Given) -> LateRows:
    return LateRows(given.param, given.state, given.since, given.schedule)


def make(update: RowUpdate) -> None:
    (batch,) = chosen().batches([update])
    batch.update(Outcome())


ENTRIES: dict[str, tuple[Callable[[Given], object], tuple[str, ...]]] = {
    "update": (
        lambda o: make(update_of(o)),
        ("param", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "row_step", "rows", "values"),
    ),
    "noted update": (
        lambda o: make(update_of(o, notes=True)),
        ("param", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "row_step", "rows", "values", "since"),
    ),
    "catch_up": (
        lambda o: chosen().catch_up(late(o), o.rows),
        ("param", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "since", "rows"),
    ),
    "flush": (
        lambda o: chosen().catch_up(late(o), range(LEAD[0])),
        ("param", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "since"),
    ),
    "norm": (lambda o: chosen().norm(o.gradient(), 2.0), ("rows", "values")),
    "has_nonfinite": (lambda o: chosen().has_nonfinite(o.gradient()), ("rows", "values")),
    "first_outside": (lambda o: chosen().first_outside(o.rows, LEAD[0]), ("rows",)),
    "look_at": (lambda o: chosen().look_at(o.gradient(), admit_notes(o.since, LEAD), 1), ("since", "rows", "values")),
}


def shorter(tensor: Tensor) -> Tensor:
    return tensor[:-1].clone()


def longer(tensor: Tensor) -> Tensor:
    return torch.cat([tensor, tensor])


def of_another_dtype(tensor: Tensor) -> Tensor:
    return tensor.to(torch.int16)


def of_more_dimensions(tensor: Tensor) -> Tensor:
    return tensor.unsqueeze(0)


def with_a_freed_storage(tensor: Tensor) -> Tensor:
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


def with_a_smaller_storage(tensor: Tensor) -> Tensor:
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(tensor.nbytes - 1)
    return tensor


WAYS = (shorter, longer, of_another_dtype, of_more_dimensions, with_a_freed_storage, with_a_smaller_storage)

# A list of row numbers may have any length.
ANY_LENGTH = {("rows", shorter), ("rows", longer)}
CASES = [
    pytest.param(entry, operand, way, id=f"{entry}-{operand}-{way.__name__}")
    for entry, (_, operands) in ENTRIES.items()
    for operand in operands
    for way in WAYS
    if (operand, way) not in ANY_LENGTH or entry in ("update", "noted update", "norm", "has_nonfinite", "look_at")
]


@pytest.mark.parametrize("entry", ENTRIES)
def test_what_is_right_passes(entry: str) -> None:
    ENTRIES[entry][0](Given())


@pytest.mark.parametrize(("entry", "operand", "way"), CASES)
def test_each_operand_wrong_in_each_way_is_an_error(entry: str, operand: str, way: Callable[[Tensor], Tensor]) -> None:
    operands = Given()
    operands.set(operand, way(operands.get(operand)))
    with pytest.raises((TypeError, ValueError), match="expected"):
        ENTRIES[entry][0](operands)


CHANGES: dict[str, Callable[[Tensor], object]] = {
    "replaced by a shorter one": lambda tensor: setattr(tensor, "data", shorter(tensor)),
    "replaced by a longer one": lambda tensor: setattr(tensor, "data", longer(tensor)),
    "freed": lambda tensor: tensor.untyped_storage().resize_(0),
    "made smaller": lambda tensor: tensor.untyped_storage().resize_(tensor.nbytes - 1),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("operand", ["param", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"])
def test_late_rows_that_passed_once_are_looked_at_again(operand: str, change: str) -> None:
    operands = Given()
    rows = late(operands)
    chosen().catch_up(rows, operands.rows)
    CHANGES[change](operands.get(operand))
    with pytest.raises(ValueError, match="expected"):
        chosen().catch_up(rows, operands.rows)


@pytest.mark.parametrize("operand", ["param", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"])
@pytest.mark.parametrize("entry", ["update", "catch_up", "flush"])
def test_strides_and_offsets_of_their_own_are_no_error(entry: str, operand: str) -> None:
    plain, strided = Given(), Given()
    for name in ("param", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "values"):
        strided.set(name, plain.get(name).clone())
    wide = torch.zeros(7, 9)
    wide[1:, 3:7] = strided.get(operand)
    strided.set(operand, wide[1:, 3:7])
    for operands in (plain, strided):
        ENTRIES[entry][0](operands)
    for name in ("param", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
        torch.testing.assert_close(strided.get(name), plain.get(name))


@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq", "max_exp_avg_sq", "row_step"])
def test_a_state_that_lacks_something_is_an_error(key: str) -> None:
    operands = Given()
    del operands.state[key]
    with pytest.raises(ValueError, match=f"its state has no '{key}'; expected a complete state. Load one, or clear"):
        ENTRIES["update"][0](operands)


def deferred(rows: int = 10) -> tuple[nn.Embedding, DeferredAdam]:
    """A table of which most rows wait."""
    module = embedding(rows, 4)
    optimizer = DeferredAdam(module, lr=0.1)
    module(torch.arange(rows)).square().sum().backward()
    optimizer.step()
    for _ in range(5):
        optimizer.zero_grad()
        module(torch.tensor([0])).square().sum().backward()
        optimizer.step()
    return module, optimizer


@pytest.mark.parametrize("rows", [4, 20, 100_000])
@pytest.mark.parametrize(
    "read",
    [
        lambda module, optimizer: module.state_dict(),
        lambda module, optimizer: optimizer.state_dict(),
        lambda module, optimizer: optimizer.flush(),
        lambda module, optimizer: module(torch.tensor([3])),
        lambda module, optimizer: optimizer.catch_up(module.weight, torch.tensor([3])),
        lambda module, optimizer: optimizer.keep_rows(module.weight, torch.tensor([0])),
    ],
    ids=["state_dict", "optimizer's state_dict", "flush", "lookup", "catch_up", "keep_rows"],
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


@pytest.mark.parametrize("rows", [4, 100_000])
def test_a_table_replaced_together_with_its_state_is_an_error_at_the_next_step(rows: int) -> None:
    """All tensors are the objects that they were; only the notes per row tell."""
    module, optimizer = deferred()
    module.weight.data = torch.zeros(rows, 4, dtype=torch.float64)
    for key in ("exp_avg", "exp_avg_sq"):
        optimizer.state[module.weight][key].data = torch.zeros(rows, 4, dtype=torch.float64)
    module.weight.grad = rows_of(module.weight, [rows - 1])
    with pytest.raises(ValueError, match=rf"\({rows}, 4\); expected leading dimensions \(10,\)"):
        optimizer.step()
    assert not module.weight.any()


def test_a_replaced_table_can_be_put_back() -> None:
    module, optimizer = deferred()
    old = module.weight.data
    module.weight.data = torch.zeros(3, 4, dtype=torch.float64)
    with pytest.raises(ValueError, match="expected leading dimensions"):
        optimizer.flush()
    module.weight.data = old
    optimizer.flush()


def test_a_replaced_table_begins_anew_if_its_state_is_cleared() -> None:
    module, optimizer = deferred()
    module.weight.data = torch.zeros(20, 4, dtype=torch.float64)
    optimizer.state.clear()
    optimizer.zero_grad()
    module(torch.tensor([19])).sum().backward()
    optimizer.step()
    assert int(optimizer.state[module.weight]["step"]) == 1
    assert optimizer.state_dict()["state"][0]["exp_avg"].shape == (20, 4)


def test_a_table_whose_storage_is_freed() -> None:
    """As sharding packages do between a step and the next."""
    param = table(6, 4)
    optimizer = SparseAdam([param])
    step_with(optimizer, param, rows_of(param, [1]))
    param.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="storage of the parameter is too small for its shape"):
        step_with(optimizer, param, sparse([[1]], torch.ones(1, 4), (6, 4)))


@pytest.mark.parametrize("part", ["values", "indices"])
def test_a_gradient_whose_storage_is_freed(part: str) -> None:
    param = table(6, 4)
    optimizer = SparseAdam([param])
    step_with(optimizer, param, rows_of(param, [1]))
    before = Snapshot(optimizer)
    grad = rows_of(param, [0, 1, 5])
    getattr(grad, f"_{part}")().untyped_storage().resize_(0)
    param.grad = grad
    for action in (optimizer.step, lambda: clip_grad_norm_([param], 1.0)):
        with pytest.raises((RuntimeError, ValueError), match="storage"):  # torch's words for indices, ours for values
            action()
    before.assert_unchanged()


def test_indices_of_a_gradient_are_checked_before_they_are_addresses() -> None:
    gradient = row_gradient(rows_of(table(6, 4), [1, 2]), torch.Size(SHAPE))
    assert gradient.rows.dtype == torch.int64
    assert chosen().first_outside(torch.tensor([0, 7, -1]), 6) == 7
    assert chosen().first_outside(torch.tensor([0, 5, -1]), 6) == -1
    assert chosen().first_outside(torch.tensor([0, 5]), 6) is None

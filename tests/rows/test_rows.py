"""Row surgery: tables change in the middle of a run, and the rows that remain go on as if nothing had happened."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rowstep import DeferredAdam, SparseAdam, select_rows_
from tests.helpers.gradients import Snapshot, rows_of, step_with, table

pytestmark = pytest.mark.usefixtures("backend")


def test_new_rows_are_what_a_function_makes_of_them() -> None:
    param = table(4, 2)
    optimizer = SparseAdam([param])
    param.grad = rows_of(param, [3])
    optimizer.grow(param, 3, init=torch.nn.init.ones_)
    assert param.grad is None  # it is of the old rows
    optimizer.grow(param, 1, init=lambda rows: torch.full_like(rows, 7.0))
    assert param[4:].tolist() == [[1.0, 1.0]] * 3 + [[7.0, 7.0]]
    optimizer.grow(param, 1000)
    assert 0.9 < float(param.detach()[8:].std()) < 1.1


@pytest.mark.parametrize(
    ("operate", "error", "message"),
    [
        (lambda opt, p: opt.grow(p, -1), ValueError, "rows is -1; expected the number of rows to add"),
        (lambda opt, p: opt.grow(p, 2, torch.zeros(3, 2)), ValueError, r"init has shape \(3, 2\); expected \(2, 2\)"),
        (lambda opt, p: opt.keep_rows(p, torch.tensor([4])), IndexError, "id 4 is outside .* 0 <= id < 4"),
        (lambda opt, p: opt.keep_rows(p, torch.tensor([1, 1])), ValueError, "ids contains duplicates"),
        (
            lambda opt, p: opt.keep_rows(p, torch.tensor([0.5])),
            TypeError,
            "dtype torch.float32; expected an integer tensor",
        ),
        (lambda opt, p: opt.keep_rows(p, torch.tensor([True])), ValueError, "the mask has 1 entries; expected 4, one"),
        (lambda opt, p: opt.keep_rows(p, torch.tensor([[1]])), ValueError, r"shape \(1, 1\); expected one dimension"),
        (lambda opt, p: opt.permute_rows(p, torch.tensor([1, 0])), ValueError, "order has 2 entries; expected 4, with"),
        (lambda opt, p: opt.permute_rows(p, torch.ones(4).bool()), ValueError, "order is boolean; expected integer"),
        (lambda opt, p: opt.reset_rows(p, torch.tensor([-1])), IndexError, "id -1 is outside"),
        (lambda opt, p: opt.reset_rows(table(4, 2), torch.tensor([1])), ValueError, "does not belong to this opt"),
        (lambda opt, p: opt.grow(p, 1.5), ValueError, "rows is 1.5; expected the number of"),
        (lambda opt, p: opt.grow(p, 1, None), TypeError, "init is None; expected a tensor"),
        (
            lambda opt, p: opt.keep_rows(p, [1]),
            TypeError,
            "ids is a list; expected an integer tensor or a boolean mask",
        ),
        (lambda opt, p: opt.reset_rows(None, torch.tensor([1])), TypeError, "of type NoneType; expected a parameter"),
    ],
)
def test_an_invalid_request_changes_nothing(
    operate: Callable[[Any, Tensor], None], error: type[Exception], message: str
) -> None:
    param = table(4, 2)
    optimizer = SparseAdam([param])
    step_with(optimizer, param, rows_of(param, [1, 2]))
    before = Snapshot(optimizer)
    with pytest.raises(error, match=message):
        operate(optimizer, param)
    before.assert_unchanged()


def test_selected_rows_count_as_touched_whatever_their_values() -> None:
    param = table(5, 2)
    param.grad = torch.tensor([[1.0, 2.0], [0.0, 0.0], [3.0, 4.0], [5.0, 6.0], [0.0, 0.0]])
    select_rows_(param, torch.tensor([False, True, True, False, False]))
    assert param.grad.is_sparse
    assert param.grad._indices().tolist() == [[1, 2]]
    assert param.grad._values().tolist() == [[0.0, 0.0], [3.0, 4.0]]
    before = param.detach().clone()
    SparseAdam([param]).step()
    assert (param != before).any(dim=1).tolist() == [False, False, True, False, False]
    with pytest.raises(ValueError, match="gradient is sparse; expected a dense one"):
        select_rows_(param, torch.tensor([1]))
    with pytest.raises(ValueError, match="gradient is None"):
        select_rows_(table(2, 2), torch.tensor([1]))


def test_a_module_in_place_of_its_parameter() -> None:
    module, ids = torch.nn.Embedding(4, 2), torch.tensor([1])
    sparse, deferred = SparseAdam(module.parameters()), DeferredAdam(module.parameters())
    calls: list[Callable[[Any], None]] = [
        lambda param: sparse.grow(param, 1), lambda param: sparse.keep_rows(param, ids),
        lambda param: sparse.permute_rows(param, ids), lambda param: sparse.reset_rows(param, ids),
        lambda param: deferred.catch_up(param, ids), deferred.flush, lambda param: select_rows_(param, ids),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(TypeError, match=r"param is of type Embedding; expected a .*: pass module\.weight$"):
            call(module)

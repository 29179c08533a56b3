"""Options that a program sets between steps: honoured, or refused by the next step before anything has changed."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from rowstep import DeferredAdam, DeferredAdamW, SparseAdam
from tests.helpers.gradients import Snapshot, rows_of, table

BAD: list[tuple[str, Any]] = [
    ("betas", (1.0, 0.999)),
    ("betas", [0.9, 1.0]),
    ("eps", -1.0),
    ("weight_decay", torch.tensor(-0.1)),
    ("lr", "x"),
    ("lr", torch.ones(2)),
    ("amsgrad", "x"),
]


CASES: list[tuple[Any, str, Any]] = [(kind, *case) for kind in (SparseAdam, DeferredAdam) for case in BAD]
# Options that rows cannot wait under.
CASES += [
    (DeferredAdam, "eps", 0.0),
    (DeferredAdam, "lr", -0.1),
    (DeferredAdam, "lr", torch.tensor(-0.1)),
    (DeferredAdam, "weight_decay", 0.1),
    (DeferredAdamW, "betas", (0.99, 0.9)),
    (DeferredAdamW, "weight_decay", 1e4),
]


@pytest.mark.parametrize(("optimizer", "name", "value"), CASES, ids=str)
def test_an_invalid_option_is_refused_with_nothing_changed(optimizer: Any, name: str, value: Any) -> None:
    params = [table(4, 3), table(4, 3)]
    made = optimizer([{"params": [param]} for param in params])
    for param in params:
        param.grad = rows_of(param, [1])
    made.step()
    good = made.param_groups[1][name]
    before = Snapshot(made)
    made.param_groups[1][name] = value
    with pytest.raises(
        ValueError, match=r"in group 1(; (expected|deferred steps need)|, but has 2)|of group 1: eps is 0; expected"
    ):
        made.step()
    del made.param_groups[1][name]
    with pytest.raises(ValueError, match=f"'{name}' is missing in group 1; expected"):
        made.step()
    before.assert_unchanged()
    made.param_groups[1][name] = good
    made.step()


@pytest.mark.parametrize("is_replaced", [False, True])
@pytest.mark.parametrize("optimizer", [SparseAdam, DeferredAdam])
def test_the_table_of_a_dropped_group_is_let_go(optimizer: Any, is_replaced: bool) -> None:
    kept, dropped = table(4, 2), table(4, 2)
    ours = optimizer([{"params": [kept]}, {"params": [dropped]}])
    kept.grad, dropped.grad = rows_of(kept, [1]), rows_of(dropped, [1])
    ours.step()
    ours.param_groups.pop()
    ours.state.pop(dropped)
    gone = weakref.ref(dropped)
    del dropped
    if is_replaced:
        ours.add_param_group({"params": [table(4, 2)]})
    ours.step()
    gc.collect()
    assert gone() is None

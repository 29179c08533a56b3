"""Options that a program sets between steps: honoured, or refused by the next step before anything has changed."""

from __future__ import annotations

import gc
import math
import weakref
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from rowstep import DeferredAdam, DeferredAdamW, SparseAdam
from rowstep._options import check_learning_rate
from tests.helpers.gradients import Snapshot, copy_of, rows_of, table

BAD: list[tuple[str, Any]] = [
    ("betas", (1.0, 0.999)),
    ("betas", [0.9, 1.0]),
    ("eps", -1.0),
    ("weight_decay", torch.tensor(-0.1)),
    ("lr", "x"),
    ("lr", None),
    ("lr", 0.1j),
    ("lr", math.nan),
    ("lr", math.inf),
    ("lr", -5.0),
    ("lr", torch.ones(2)),
    ("lr", torch.tensor(math.nan)),
    ("lr", torch.tensor(0.1 + 0j)),
    ("lr", torch.tensor([0.1]).to_sparse()),
    ("lr", torch.empty((), device="meta")),
    ("amsgrad", "x"),
]


CASES: list[tuple[Any, str, Any]] = [(kind, *case) for kind in (SparseAdam, DeferredAdam) for case in BAD]
# Options that rows cannot wait under.
CASES += [
    (DeferredAdam, "eps", 0.0),
    (DeferredAdam, "weight_decay", 0.1),
    (DeferredAdamW, "betas", (0.99, 0.9)),
    (DeferredAdamW, "weight_decay", 1e4),
]


@pytest.mark.parametrize(("optimizer", "name", "value"), CASES, ids=str)
def test_an_invalid_option_is_refused_with_nothing_changed(optimizer: Any, name: str, value: Any) -> None:
    params = [table(4, 3), table(4, 3)]
    made, fresh = (optimizer([{"params": [param]} for param in params]) for _ in range(2))
    for param in params:
        param.grad = rows_of(param, [1])
    made.step()
    good = made.param_groups[1][name]
    made.flush() if optimizer is not SparseAdam else None
    before = Snapshot(made)
    for each in (made, fresh):
        each.param_groups[1][name] = value
        with pytest.raises(
            ValueError,
            match=r"in group 1(; (expected|deferred steps need)|, but has 2)|of group 1: weight_decay=0.1 adds",
        ):
            each.step()
        before.assert_unchanged()
    assert not fresh.state
    del made.param_groups[1][name]
    with pytest.raises(ValueError, match=f"'{name}' is missing in group 1; expected"):
        made.step()
    before.assert_unchanged()
    made.param_groups[1][name] = good
    made.step()


NUMBERS: list[Any] = [1, Fraction(1, 10), Decimal("0.1"), np.float32(0.1), np.array(0.1), torch.tensor([0.1])]


@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize("optimizer", [SparseAdam, DeferredAdamW])
@pytest.mark.parametrize("lr", [0, 0.0, torch.tensor(0.0), *NUMBERS], ids=repr)
def test_an_lr_may_be_any_number_and_become_0(optimizer: Any, lr: Any, fused: bool | None) -> None:
    """Tables and layers alike. Of what is given in place of a float, only a Tensor keeps its own dtype."""
    starts = table(4, 3), table(3, 2)
    ends = []
    for rate in (lr, float(lr)):
        params = [copy_of(start) for start in starts]
        made = optimizer(params, lr=rate if float(lr) else 1e-3, fused=fused)
        for _ in range(2):
            params[0].grad, params[1].grad = rows_of(params[0], [1], 1.0), torch.ones(3, 2)
            made.step()
            made.param_groups[0]["lr"] = rate
        ends.append(params)
    for one, other in zip(*ends, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("optimizer", [SparseAdam, DeferredAdam])
def test_a_tensor_lr_with_foreach_is_refused_as_in_torch(optimizer: Any) -> None:
    params, lr = [table(4, 3), table(3, 2)], torch.tensor(0.1)
    words = "lr as a Tensor is not supported for capturable=False and foreach=True"
    for kind in (torch.optim.Adam, optimizer):
        with pytest.raises(ValueError, match=words):
            kind(params, lr=lr, foreach=True)
    with pytest.raises(ValueError, match=f"{words} in group 0; expected a number, or foreach=None"):
        optimizer([{"params": params, "lr": lr}], foreach=True)
    params[0].grad, params[1].grad = rows_of(params[0], [1]), torch.ones(3, 2)
    for options, later in (({"foreach": True}, {"lr": lr}), ({"lr": lr}, {"foreach": True})):
        made = optimizer(params, **options)
        made.step()
        made.flush() if optimizer is not SparseAdam else None
        before = Snapshot(made)
        made.param_groups[0].update(later)
        with pytest.raises(ValueError, match=f"{words} in group 0"):
            made.step()
        before.assert_unchanged()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["step", "exp_avg_sq", "max_exp_avg_sq"])
@pytest.mark.parametrize("optimizer", [SparseAdam, DeferredAdam])
def test_foreach_and_a_state_of_another_dtype(optimizer: Any, name: str, dtype: torch.dtype) -> None:
    """torch's foreach refuses it in the middle of a step; its loop takes it."""
    params = [table(4, 3), table(3, 2)]
    made = optimizer(params, foreach=True, amsgrad=True)
    for _ in range(2):
        params[0].grad, params[1].grad = rows_of(params[0], [1]), torch.ones(3, 2)
        made.step()
        if optimizer is DeferredAdam:
            made.flush()
        made.state[params[1]][name] = made.state[params[1]][name].to(dtype)
    assert made.state[params[1]]["step"] == 2


def test_an_lr_on_a_gpu_is_not_waited_for() -> None:
    """A fake tensor has a device and no number, as one that is still computed."""
    fake = pytest.importorskip("torch._subclasses.fake_tensor")
    with fake.FakeTensorMode():
        lr = torch.empty((), device="cuda")
    with pytest.raises(ValueError, match="Invalid learning rate"):
        check_learning_rate({"lr": lr})
    check_learning_rate({"lr": lr}, may_wait=False)
    for wrong in (lr.expand(2), lr.to(torch.complex64)):
        with pytest.raises(ValueError, match=r"Tensor lr must be|Invalid learning rate"):
            check_learning_rate({"lr": wrong}, may_wait=False)


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

"""Every form that a gradient can have: its memory, its entries; and dense ones under force_sparse."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from rowstep import DeferredAdamW, SparseAdam
from tests.helpers.by_hand import AdamByHand
from tests.helpers.gradients import copy_of, rows_of, same_bits, sparse, step_with, table

pytestmark = pytest.mark.usefixtures("backend")


@pytest.mark.parametrize("shape", [(4, 2), (0, 2), (4, 0), (4,)], ids=str)
def test_an_empty_gradient_counts_a_step_and_changes_nothing(shape: tuple[int, ...]) -> None:
    param = table(*shape)
    before, version = param.detach().clone(), param._version
    optimizer = SparseAdam([param])
    for _ in range(2):
        step_with(optimizer, param, rows_of(param, []))
    assert same_bits(param, before)
    assert param._version == version
    state = optimizer.state[param]
    assert state["step"] == 2
    assert state["exp_avg"].shape == state["exp_avg_sq"].shape == shape
    assert not state["exp_avg"].any()


@pytest.mark.parametrize(
    "indices",
    [
        torch.tensor([4, 9, 0, 9, 2, 9, 0, 9, 1, 9])[::2].unsqueeze(0),
        torch.tensor([[4, 0], [0, 2], [2, 1], [4, 0]]).t(),
    ],
)
def test_indices_may_be_strided(indices: Tensor) -> None:
    ours = table(6, 3)
    theirs = copy_of(ours)
    grad = sparse(indices, torch.randn(indices.shape[1], *(3,) * (2 - len(indices))), ours.shape)
    assert not grad._indices().is_contiguous()
    step_with(SparseAdam([ours]), ours, grad)
    step_with(torch.optim.SparseAdam([theirs]), theirs, grad)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("dtype", "dense"), [(torch.float64, True), (torch.bfloat16, False)])
def test_float32_gradients_of_other_parameters(dtype: torch.dtype, dense: bool) -> None:
    param = table(6, 3, dtype=dtype)
    hand = AdamByHand(param, lr=0.1, eps=1e-30)
    optimizer = SparseAdam([param], lr=0.1, eps=1e-30)
    for _ in range(3):
        values = torch.randn(6, 3)
        step_with(optimizer, param, values if dense else sparse([range(6)], values, (6, 3)))
        hand.step(range(6), values)
    assert param.dtype == optimizer.state[param]["exp_avg"].dtype == dtype
    rtol = 1e-10 if dtype == torch.float64 else 2**-6
    torch.testing.assert_close(param.detach().double(), hand.p, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_rows_of_zeros_rest_under_force_sparse(zero: float) -> None:
    param = table(3, 2)
    optimizer = SparseAdam([param], force_sparse=True)
    step_with(optimizer, param, torch.ones(3, 2))
    before = param.detach().clone()
    step_with(optimizer, param, torch.tensor([[zero, zero], [zero, 1.0], [zero, zero]]))
    assert (param != before).any(dim=1).tolist() == [False, True, False]
    assert optimizer.state[param]["step"] == 2


def dense_gradient(rows: int, columns: int, touched: int) -> tuple[Parameter, Tensor]:
    grad = torch.zeros(rows, columns)
    grad[torch.randperm(rows)[:touched]] = 1.0
    return Parameter(torch.zeros(rows, columns)), grad


@pytest.mark.parametrize("cls", [SparseAdam, DeferredAdamW])
def test_a_forgotten_sparse_is_warned_of_once(cls: type[SparseAdam | DeferredAdamW]) -> None:
    (users, of_users), (items, of_items) = dense_gradient(20_000, 64, 99), dense_gradient(30_000, 64, 99)
    optimizer = cls([("users", users), ("items", items)])
    items.grad = of_items
    message = re.escape("parameter 0 of group 0 ('users'), parameter 1 of group 0 ('items'): over nine tenths")
    with pytest.warns(UserWarning, match=f"{message}.*sparse=True") as warned:
        step_with(optimizer, users, of_users)
    assert [warning.filename for warning in warned] == [str(Path(__file__).parents[1] / "helpers" / "gradients.py")]
    step_with(optimizer, users, of_users)  # warnings are errors here


@pytest.mark.parametrize("cls", [SparseAdam, DeferredAdamW])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_penalty_that_makes_the_gradient_of_a_table_dense_is_warned_of_once(
    cls: type[SparseAdam | DeferredAdamW], dtype: torch.dtype
) -> None:
    users = torch.nn.Embedding(20_000, 64, padding_idx=0, sparse=True, dtype=dtype)
    output = torch.nn.Linear(64, 20_000, bias=False)  # as large, and every row of its gradient is of its own
    optimizer = cls([*users.named_parameters("users"), *output.named_parameters("output")])
    for step in range(2):
        optimizer.zero_grad()
        found = users(torch.randint(20_000, (900,)))
        penalty = torch.sum(1e-5 * torch.square(users.weight)) + 0.1 * users.weight.norm()
        (found.float().sum() + output(found.float()).logsumexp(1).sum() + penalty).backward()
        if step == 0:
            text = r"^parameter 0 of group 0 \('users.weight'\): over nine tenths .* an L2 penalty .* weight_decay"
            with pytest.warns(UserWarning, match=text):
                optimizer.step()
        else:
            optimizer.step()  # warnings are errors here


@pytest.mark.parametrize(
    ("rows", "columns", "touched"),
    [(20_000, 8, 99), (4_096, 512, 9), (20_000, 64, 4_000), (20_000, 64, 0)],
    ids=["small", "few rows", "many touched", "all zero"],
)
def test_other_dense_gradients_are_nothing_to_warn_of(rows: int, columns: int, touched: int) -> None:
    param, grad = dense_gradient(rows, columns, touched)
    step_with(SparseAdam([param]), param, grad)

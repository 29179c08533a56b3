"""Second moments per row, with and without a first moment, and 16 bits: against the rule evaluated densely by hand."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rowstep import DeferredAdam, DeferredAdamW, SparseAdam
from tests.helpers.by_hand import AdamByHand
from tests.helpers.deferred_cases import LONG
from tests.helpers.gradients import Snapshot, rows_of

ROWS, COLUMNS, STEPS = 40, 6, 80

pytestmark = pytest.mark.usefixtures("backend")


row_rule = functools.partial(AdamByHand, second_moment="row")


def gradients(steps: int = STEPS, *, empty_at: tuple[int, ...] = (0, 7)) -> list[tuple[Tensor, Tensor]]:
    """Row numbers with duplicates, popular and rare rows, and steps that touch none."""
    made = []
    for step in range(steps):
        count = 0 if step in empty_at else 1 + step % 9
        ids = (torch.rand(count).square() * ROWS).long()
        made.append((ids, torch.randn(count, COLUMNS, dtype=torch.float64) * 10.0 ** (step % 3 - 1)))
    return made


def run(optimizer: Any, param: nn.Parameter, steps: list[tuple[Tensor, Tensor]]) -> None:
    for ids, values in steps:
        if isinstance(optimizer, DeferredAdam):
            optimizer.catch_up(param, ids)
        param.grad = rows_of(param, ids, values)
        optimizer.step()


def table(dtype: torch.dtype = torch.float64) -> nn.Parameter:
    return nn.Parameter(torch.randn(ROWS, COLUMNS, dtype=torch.float64).to(dtype))


# Each pair is a kernel to compile. `make stress` tries all of them with all.
OPTIONS: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.1},
    {"weight_decay": 0.1, "maximize": True, "bias_correction": "row"},
    {"weight_decay": 0.1, "decoupled_weight_decay": True, "maximize": True},
]
PAIRS = [(beta1, options) for beta1 in (0.9, 0.0) for options in OPTIONS]


@pytest.mark.parametrize(("beta1", "options"), PAIRS if LONG else PAIRS[::3], ids=str)
def test_sparse_adam_follows_the_rule(beta1: float, options: dict[str, Any]) -> None:
    param, steps = table(), gradients()
    common: dict[str, Any] = {"lr": 0.01, "betas": (beta1, 0.97)} | options
    rule = row_rule(param, **common)
    run(SparseAdam([param], second_moment="row", **common), param, steps)
    for ids, values in steps:
        rule.step(ids, values)
    assert (param.detach() - rule.p).abs().max() < 1e-12


@pytest.mark.parametrize(
    ("betas", "eps"), [((0.9, 0.97), 1e-8), ((0.9, 0.999), 1e-3), ((0.5, 0.3), 1e-8), ((0.0, 0.97), 1e-3)]
)
def test_deferred_adam_is_the_rule_applied_to_every_row_at_every_step(betas: tuple[float, float], eps: float) -> None:
    """Rows are read through an embedding, and the lr changes at every step."""
    embedding = nn.Embedding(ROWS, COLUMNS, sparse=True, dtype=torch.float64)
    common: dict[str, Any] = {"betas": betas, "eps": eps, "weight_decay": 0.1}
    rule = row_rule(embedding.weight, only_touched=False, decoupled_weight_decay=True, **common)
    optimizer = DeferredAdamW(embedding.parameters(), second_moment="row", **common)
    for step, (ids, values) in enumerate(gradients(300 if LONG else 150)):
        rule.lr = optimizer.param_groups[0]["lr"] = 0.01 * (1 + math.cos(step / 10))
        read = embedding(ids)
        assert (read.detach() - rule.p[ids]).abs().sum() < 1e-11
        optimizer.zero_grad()
        torch.autograd.backward(read, values)
        optimizer.step()
        rule.step(ids, values)
    assert (embedding.weight.detach() - rule.p).abs().max() < 1e-12
    torch.testing.assert_close(
        optimizer.state[embedding.weight]["exp_avg_sq_row"], rule.v.squeeze(1), rtol=1e-12, atol=0
    )


@pytest.mark.parametrize("kind", [SparseAdam, DeferredAdam])
def test_what_is_kept(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROWSTEP_BACKEND", "reference")  # who computes it does not matter, and would compile kernels
    kept = {
        ("element", 0.0): ["exp_avg", "exp_avg_sq"],
        ("row", 0.9): ["exp_avg", "exp_avg_sq_row"],
        ("row", 0.0): ["exp_avg_sq_row"],
    }
    for (second, beta1), names in kept.items():
        for dtype, wide in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
            param = table(dtype)
            optimizer = kind([param], betas=(beta1, 0.99), second_moment=second)
            run(optimizer, param, gradients(3))
            state = optimizer.state_dict()["state"][0]
            assert sorted(state) == [*names, "step"]
            if second == "row":
                assert (state["exp_avg_sq_row"].dtype, state["exp_avg_sq_row"].shape) == (wide, (ROWS,))


@pytest.mark.parametrize("kind", [SparseAdam, DeferredAdam])
def test_a_dense_gradient_of_a_table_steps_all_its_rows(kind: Any) -> None:
    param, steps = table(), gradients(20, empty_at=())
    rule = row_rule(param, only_touched=False, lr=0.01, betas=(0.0, 0.97))
    optimizer = kind([param], lr=0.01, betas=(0.0, 0.97), second_moment="row")
    ids, values = torch.arange(ROWS), torch.randn(ROWS, COLUMNS, dtype=torch.float64)
    if kind is DeferredAdam:
        run(optimizer, param, steps)
        for each in steps:
            rule.step(*each)
    else:  # with eps where torch.optim.Adam has it; the first gradient makes it a table
        run(optimizer, param, [(ids, values)])
        rule.p, rule.steps = param.detach().clone(), 1
        rule.v = optimizer.state[param]["exp_avg_sq_row"].clone().unsqueeze(1)
    for _ in range(3):
        values = torch.randn(ROWS, COLUMNS, dtype=torch.float64)
        param.grad = param.detach() * 0 + values  # as if the whole table had been read
        optimizer.step()
        rule.step(ids, values)
    assert (param.detach() - rule.p).abs().max() < 1e-12


@pytest.mark.parametrize("kind", [SparseAdam, DeferredAdam])
def test_a_dense_gradient_of_a_table_in_16_bits_is_rounded_at_random_too(kind: Any) -> None:
    param = nn.Parameter(torch.zeros(200, 4))
    optimizer = kind([param], betas=(0.0, 0.999), state_dtype=torch.bfloat16)
    run(optimizer, param, [(torch.arange(200), torch.ones(200, 4))])
    for _ in range(199):
        param.grad = torch.ones_like(param) + 0 * param.detach()
        optimizer.step()
    second = optimizer.state_dict()["state"][0]["exp_avg_sq"]
    assert second.dtype == torch.bfloat16
    assert float(second.double().mean()) == pytest.approx(1 - 0.999**200, rel=0.01)


@pytest.mark.parametrize("kind", [SparseAdam, DeferredAdam])
def test_other_parameters_step_and_are_kept_as_in_torch(kind: Any) -> None:
    """The options concern tables. A whole model can have them."""
    ours, theirs = nn.Linear(4, 3), nn.Linear(4, 3)
    theirs.load_state_dict(ours.state_dict())
    optimizer = kind(ours.parameters(), second_moment="row", betas=(0.0, 0.9), state_dtype=torch.bfloat16)
    reference = torch.optim.Adam(theirs.parameters(), betas=(0.0, 0.9), fused=True)
    for _ in range(5):
        inputs = torch.randn(8, 4)
        for model, each in ((ours, optimizer), (theirs, reference)):
            each.zero_grad()
            model(inputs).square().sum().backward()
            each.step()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other)
        assert all(torch.equal(optimizer.state[one][key], value) for key, value in reference.state[other].items())


def test_force_sparse_makes_a_table() -> None:
    param = table()
    optimizer = SparseAdam([param], force_sparse=True, second_moment="row", betas=(0.0, 0.9))
    param.grad = torch.zeros_like(param)
    param.grad[3] = 1
    before = param.detach().clone()
    optimizer.step()
    assert (param.detach() != before).any(dim=1).nonzero().flatten().tolist() == [3]
    assert sorted(optimizer.state[param]) == ["exp_avg_sq_row", "step"]


@pytest.mark.parametrize("kind", [SparseAdam, DeferredAdamW])
def test_rows_that_are_moved_take_their_moments_along(kind: Any) -> None:
    param, steps = table(), gradients()
    optimizer = kind([param], lr=0.01, betas=(0.0, 0.97), second_moment="row")
    run(optimizer, param, steps[:40])
    optimizer.permute_rows(param, torch.arange(ROWS).flip(0))
    optimizer.grow(param, 5)
    optimizer.reset_rows(param, torch.tensor([3, 4]))
    optimizer.keep_rows(param, torch.arange(ROWS))
    row = optimizer.state[param]["exp_avg_sq_row"]
    assert not row[[3, 4]].any()
    rule = row_rule(param, only_touched=kind is SparseAdam, lr=0.01, betas=(0.0, 0.97))
    rule.v, rule.steps = row.clone().unsqueeze(1), 40
    if kind is DeferredAdamW:
        rule.weight_decay, rule.decoupled_weight_decay = 0.01, True
    run(optimizer, param, steps[40:])
    for ids, values in steps[40:]:
        rule.step(ids, values)
    assert (param.detach() - rule.p).abs().max() < 1e-12


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (SparseAdam, {"second_moment": "factored"}, "Invalid second_moment: 'factored'; expected 'element' or 'row'$"),
    (SparseAdam, {"second_moment": "row", "amsgrad": True}, "amsgrad=True with second_moment='row' is not supported"),
    (DeferredAdam, {"second_moment": "row", "amsgrad": True}, "amsgrad keeps a maximum for every weight"),
    (SparseAdam, {"state_dtype": torch.int8}, "Invalid state_dtype: torch.int8; expected None or torch.bfloat16"),
    (SparseAdam, {"state_dtype": "bfloat16"}, "Invalid state_dtype: 'bfloat16'"),
    (SparseAdam, {"seed": -1}, r"Invalid seed: -1; expected an integer in \[0, 2\^63\)"),
    (SparseAdam, {"seed": 1.0}, "Invalid seed: 1.0"),
    (DeferredAdamW, {"stochastic_rounding": True}, "stochastic_rounding=True has nothing to round in group 0"),
    (SparseAdam, {"stochastic_rounding": 1.0}, "Invalid stochastic_rounding: 1.0; expected False or True"),
]


@pytest.mark.parametrize(("kind", "options", "message"), REFUSED, ids=str)
def test_what_has_no_meaning_is_refused_at_construction(kind: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind([table()], **options)


@pytest.mark.parametrize("kind", [SparseAdam, DeferredAdam])
def test_a_state_per_element_is_reduced_to_rows_when_the_option_changes(kind: Any) -> None:
    """A warning says how. The next step goes on from that, as if it had always been so. There is no way back."""
    param, steps = table(), gradients(30)
    optimizer = kind([param], lr=0.01, betas=(0.0, 0.97))
    run(optimizer, param, steps[:20])
    rule = row_rule(param, only_touched=kind is SparseAdam, lr=0.01, betas=(0.0, 0.97))
    rule.v, rule.steps = optimizer.state_dict()["state"][0]["exp_avg_sq"].mean(dim=1, keepdim=True), 20
    optimizer.param_groups[0]["second_moment"] = "row"
    words = "parameter 0 of group 0: .*'exp_avg_sq' reduced to its mean over each row; 'exp_avg' dropped, because beta1"
    with pytest.warns(UserWarning, match=words):
        run(optimizer, param, steps[20:21])
    run(optimizer, param, steps[21:])
    for ids, values in steps[20:]:
        rule.step(ids, values)
    assert (param.detach() - rule.p).abs().max() < 1e-12
    before = param.detach().clone()
    optimizer.param_groups[0]["second_moment"] = "element"
    with pytest.raises(ValueError, match=r"exp_avg_sq_row.*expected.*second_moment=.row"):
        run(optimizer, param, steps[:1])
    assert torch.equal(param, before)
    optimizer.state.clear()  # a way out
    run(optimizer, param, steps[1:2])
    assert sorted(optimizer.state[param]) == ["exp_avg", "exp_avg_sq", "step"]


@pytest.mark.parametrize("options", [{"second_moment": "row"}, {"state_dtype": torch.bfloat16}, {}], ids=str)
def test_state_that_is_there_is_not_allocated_again(options: dict[str, Any]) -> None:
    """As it would be for plain tables beside sharded ones, after each load."""
    param = table(torch.float32)
    optimizer = SparseAdam([param], **options)
    run(optimizer, param, gradients(3))
    before = Snapshot(optimizer)
    optimizer.allocate_state()
    before.assert_unchanged()

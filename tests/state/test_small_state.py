"""Second moments per row and factored, with and without a first moment: against the rules evaluated densely by hand."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rowstep import DeferredAdam, DeferredAdamW, SparseAdam
from tests.helpers.deferred_cases import LONG
from tests.helpers.dense_rules import DenseRule
from tests.helpers.gradients import rows_of, sparse

ROWS, COLUMNS, STEPS = 40, 6, 80

pytestmark = pytest.mark.usefixtures("backend")


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
    {"weight_decay": 0.1, "maximize": True},
    {"weight_decay": 0.1, "decoupled_weight_decay": True, "maximize": True},
]
KINDS = [("row", 0.9), ("row", 0.0), ("factored", 0.9), ("factored", 0.0)]
PAIRS = [(*kind, options) for kind in KINDS for options in OPTIONS]


@pytest.mark.parametrize(("second", "beta1", "options"), PAIRS if LONG else PAIRS[::5], ids=str)
def test_sparse_adam_follows_the_rule(second: str, beta1: float, options: dict[str, Any]) -> None:
    param, steps = table(), gradients()
    common: dict[str, Any] = {"lr": 0.01, "betas": (beta1, 0.97), "second_moment": second} | options
    rule = DenseRule(param, only_touched=True, **common)
    run(SparseAdam([param], **common), param, steps)
    for ids, values in steps:
        rule.step(ids, values)
    assert (param.detach() - rule.p).abs().max() < 1e-12


def test_a_row_moment_with_counts_of_each_row() -> None:
    param, steps = table(), gradients()
    common: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.97), "second_moment": "row", "bias_correction": "row"}
    rule = DenseRule(param, only_touched=True, **common)
    run(SparseAdam([param], **common), param, steps)
    for ids, values in steps:
        rule.step(ids, values)
    assert (param.detach() - rule.p).abs().max() < 1e-12


@pytest.mark.parametrize(
    ("second", "betas"),
    [("row", (0.9, 0.97)), ("row", (0.9, 0.999)), ("row", (0.5, 0.3)), ("row", (0.0, 0.97)), ("factored", (0.0, 0.97)),
     ("factored", (0.0, 0.999))],
)  # fmt: skip
@pytest.mark.parametrize(("weight_decay", "eps"), [(0.1, 1e-8), (0.1, 1e-3), *([(0.0, 1e-8)] if LONG else [])])
def test_deferred_adam_is_the_rule_applied_to_every_row_at_every_step(
    second: str, betas: tuple[float, float], weight_decay: float, eps: float
) -> None:
    param, steps = table(), gradients(300)
    rule = DenseRule(
        param, second, only_touched=False, lr=0.01, betas=betas, eps=eps,
        weight_decay=weight_decay, decoupled_weight_decay=True,
    )  # fmt: skip
    optimizer = DeferredAdamW(
        [param], lr=0.01, betas=betas, eps=eps, weight_decay=weight_decay, second_moment=second
    )  # fmt: skip
    run(optimizer, param, steps)
    for ids, values in steps:
        rule.step(ids, values)
    state = optimizer.state[param]
    assert (param.detach() - rule.p).abs().max() < 1e-12
    torch.testing.assert_close(state["exp_avg_sq_row"], rule.row, rtol=1e-12, atol=0)
    if second == "factored":
        torch.testing.assert_close(state["exp_avg_sq_column"], rule.column, rtol=1e-12, atol=0)
        assert float(state["exp_avg_sq_sum"]) == pytest.approx(float(rule.row.sum()), rel=1e-12)


def test_a_deferred_schedule_of_learning_rates() -> None:
    """Rows are read through an embedding, and the lr changes at every step."""
    for second, beta1 in (("row", 0.9), ("row", 0.0), ("factored", 0.0)):
        embedding = nn.Embedding(ROWS, COLUMNS, sparse=True, dtype=torch.float64)
        optimizer = DeferredAdamW(embedding.parameters(), lr=0.0, betas=(beta1, 0.98), second_moment=second)
        rule = DenseRule(
            embedding.weight, second, only_touched=False, betas=(beta1, 0.98), weight_decay=0.01,
            decoupled_weight_decay=True,
        )  # fmt: skip
        for step, (ids, values) in enumerate(gradients(120, empty_at=())):
            rule.lr = optimizer.param_groups[0]["lr"] = 0.02 * (1 + math.cos(step / 10))
            assert (embedding(ids).detach() - rule.p[ids]).abs().max() < 1e-12
            optimizer.zero_grad()
            torch.autograd.backward(embedding(ids), values)
            optimizer.step()
            rule.step(ids, values)
        assert (embedding.weight.detach() - rule.p).abs().max() < 1e-12


@pytest.mark.parametrize("kind", [SparseAdam, DeferredAdam])
def test_what_is_kept(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROWSTEP_BACKEND", "reference")  # who computes it does not matter, and would compile ten kernels
    kept = {
        ("element", 0.0): ["exp_avg", "exp_avg_sq"],
        ("row", 0.9): ["exp_avg", "exp_avg_sq_row"],
        ("row", 0.0): ["exp_avg_sq_row"],
        ("factored", 0.0): ["exp_avg_sq_column", "exp_avg_sq_row", "exp_avg_sq_sum"],
    }
    for (second, beta1), names in kept.items():
        for dtype, wide in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
            param = table(dtype)
            optimizer = kind([param], betas=(beta1, 0.99), second_moment=second)
            run(optimizer, param, gradients(3))
            state = optimizer.state_dict()["state"][0]
            assert sorted(state) == [*names, "step"]
            if second != "element":
                assert state["exp_avg_sq_row"].dtype == wide
                assert state["exp_avg_sq_row"].shape == (ROWS,)
            if second == "factored":
                assert state["exp_avg_sq_column"].shape == (COLUMNS,)
                assert state["exp_avg_sq_sum"].dtype == torch.float64


@pytest.mark.parametrize("second", ["row", "factored"])
def test_threads_do_not_change_a_bit(second: str) -> None:
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        param = nn.Parameter(torch.randn(3000, 40))
        optimizer = SparseAdam([param], second_moment=second)
        for _ in range(3):
            param.grad = rows_of(param, torch.randint(3000, (4000,)).tolist())
            optimizer.step()
        results.append((param.detach(), optimizer.state[param]))
    for weights, state in results[1:]:
        assert torch.equal(weights, results[0][0])
        assert all(torch.equal(state[name], results[0][1][name]) for name in state if name != "step")


def test_skipped_rows_are_not_in_the_columns_either() -> None:
    for second in ("row", "factored"):
        steps = gradients()
        clean, dirty = table(), table()
        dirty.data = clean.data.clone()
        options: dict[str, Any] = {"second_moment": second, "nonfinite": "skip", "lr": 0.01}
        skipping = SparseAdam([dirty], **options)
        last, infinite = torch.tensor([ROWS - 1]), torch.full((1, COLUMNS), torch.inf, dtype=torch.float64)
        run(skipping, dirty, [(torch.cat([ids, last]), torch.cat([values, infinite])) for ids, values in steps])
        others = [(ids[ids != last], values[ids != last]) for ids, values in steps]
        run(SparseAdam([clean], **options), clean, others)
        assert skipping.skipped_rows == STEPS
        torch.testing.assert_close(dirty, clean, rtol=1e-13, atol=1e-13)


def test_a_table_of_rows_over_two_dimensions() -> None:
    """Rows are what the gradient's sparse dimensions name."""
    param = nn.Parameter(torch.randn(3, 4, 5, dtype=torch.float64))
    flat = nn.Parameter(param.detach().reshape(12, 5).clone())
    for second in ("row", "factored"):
        both = SparseAdam([param], second_moment=second), SparseAdam([flat], second_moment=second)
        for _ in range(3):
            indices, values = torch.tensor([[0, 2, 2], [1, 3, 3]]), torch.randn(3, 5, dtype=torch.float64)
            param.grad = sparse(indices, values, param.shape)
            flat.grad = rows_of(flat, indices[0] * 4 + indices[1], values)
            both[0].step()
            both[1].step()
        assert both[0].state[param]["exp_avg_sq_row"].shape == (3, 4)
        torch.testing.assert_close(param.reshape(12, 5), flat)
        param.grad = rows_of(param, [1])
        with pytest.raises(
            ValueError, match=r"rows span dimensions \(3,\), but second_moment has kept rows over \(3, 4\)"
        ):
            both[0].step()


@pytest.mark.parametrize("kind", [SparseAdam, DeferredAdam])
def test_a_dense_gradient_of_a_table_steps_all_its_rows(kind: Any) -> None:
    for second in ("row", "factored"):
        param, steps = table(), gradients(20, empty_at=())
        rule = DenseRule(param, second, only_touched=False, lr=0.01, betas=(0.0, 0.97))
        optimizer = kind([param], lr=0.01, betas=(0.0, 0.97), second_moment=second)
        ids, values = torch.arange(ROWS), torch.randn(ROWS, COLUMNS, dtype=torch.float64)
        if kind is DeferredAdam:
            run(optimizer, param, steps)
            for each in steps:
                rule.step(*each)
        else:  # with eps where torch.optim.Adam has it; the first gradient makes it a table
            run(optimizer, param, [(ids, values)])
            rule.p, rule.steps = param.detach().clone(), 1
            rule.row = optimizer.state[param]["exp_avg_sq_row"].clone()
            rule.column = values.square().mean(dim=0) * 0.03
        for _ in range(3):
            values = torch.randn(ROWS, COLUMNS, dtype=torch.float64)
            param.grad = param.detach() * 0 + values  # as if the whole table had been read
            optimizer.step()
            rule.step(ids, values)
        assert (param.detach() - rule.p).abs().max() < 1e-12


@pytest.mark.parametrize("kind", [SparseAdam, DeferredAdam])
def test_other_parameters_step_and_are_kept_as_in_torch(kind: Any) -> None:
    """The options concern tables. A whole model can have them."""
    torch.manual_seed(0)
    ours, theirs = nn.Linear(4, 3), nn.Linear(4, 3)
    theirs.load_state_dict(ours.state_dict())
    optimizer = kind(ours.parameters(), second_moment="factored", betas=(0.0, 0.9), state_dtype=torch.bfloat16)
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
    optimizer = kind([param], lr=0.01, betas=(0.0, 0.97), second_moment="factored")
    run(optimizer, param, steps[:40])
    optimizer.permute_rows(param, torch.arange(ROWS).flip(0))
    optimizer.grow(param, 5)
    optimizer.reset_rows(param, torch.tensor([3, 4]))
    optimizer.keep_rows(param, torch.arange(ROWS))
    state = optimizer.state[param]
    assert not state["exp_avg_sq_row"][[3, 4]].any()
    assert float(state["exp_avg_sq_sum"]) == pytest.approx(float(state["exp_avg_sq_row"].sum()), rel=1e-12)
    rule = DenseRule(param, "factored", only_touched=kind is SparseAdam, lr=0.01, betas=(0.0, 0.97))
    rule.row, rule.column, rule.steps = state["exp_avg_sq_row"].clone(), state["exp_avg_sq_column"].clone(), 40
    if kind is DeferredAdamW:
        rule.weight_decay, rule.decoupled_weight_decay = 0.01, True
    run(optimizer, param, steps[40:])
    for ids, values in steps[40:]:
        rule.step(ids, values)
    assert (param.detach() - rule.p).abs().max() < 1e-12


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (
        SparseAdam,
        {"second_moment": "column"},
        "Invalid second_moment: 'column'; expected 'element' or 'row' or 'factored'",
    ),
    (SparseAdam, {"second_moment": "row", "amsgrad": True}, "amsgrad=True with second_moment='row' is not supported"),
    (DeferredAdam, {"second_moment": "row", "amsgrad": True}, "amsgrad keeps a maximum for every weight"),
    (SparseAdam, {"second_moment": "factored", "bias_correction": "row"}, "bias_correction='row' with second_moment"),
    (
        DeferredAdam,
        {"second_moment": "factored"},
        r"betas=\(0.9, 0.999\) with second_moment='factored' is not supported",
    ),
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
def test_options_that_change_in_a_run_make_the_state_fit(kind: Any) -> None:
    """A warning says what was reduced or written out. The next step goes on from that, as if it had always been so."""
    param, steps = table(), gradients(60)
    optimizer = kind([param], lr=0.01, betas=(0.0, 0.97))
    run(optimizer, param, steps[:20])
    changes = [
        ("row", "'exp_avg_sq' reduced to its mean over each row; 'exp_avg' dropped, because beta1 is 0"),
        ("element", "'exp_avg_sq_row' written out to 'exp_avg_sq'"),
        (
            "factored",
            "'exp_avg_sq' reduced to its mean over each row; 'exp_avg_sq' reduced to its mean over each column",
        ),
        ("element", "'exp_avg_sq_row' written out to 'exp_avg_sq'"),
    ]
    for number, (second, words) in enumerate(changes):
        before = {name: slot.clone() for name, slot in optimizer.state_dict()["state"][0].items() if name != "step"}
        taken = int(optimizer.state[param]["step"])
        rule = DenseRule(param, second, only_touched=kind is SparseAdam, lr=0.01, betas=(0.0, 0.97))
        rule.steps = taken
        if "exp_avg_sq" in before:
            rule.row = before["exp_avg_sq"].mean(dim=1)
            rule.column = before["exp_avg_sq"].mean(dim=0)
        optimizer.param_groups[0]["second_moment"] = second
        some = steps[20 + 10 * number : 30 + 10 * number]
        with pytest.warns(UserWarning, match="parameter 0 of group 0: its state was made to fit .* " + words):
            run(optimizer, param, some[:1])
        run(optimizer, param, some[1:])
        if second != "element":
            for ids, values in some:
                rule.step(ids, values)
            assert (param.detach() - rule.p).abs().max() < 1e-12
    assert sorted(optimizer.state[param]) == ["exp_avg", "exp_avg_sq", "step"]


def test_a_table_without_a_single_touched_row_stays_as_it_is() -> None:
    for kind, second in itertools.product((SparseAdam, DeferredAdam), ("row", "factored")):
        param = table()
        before = param.detach().clone()
        optimizer = kind([param], betas=(0.0, 0.9), second_moment=second)
        run(optimizer, param, [(torch.empty(0, dtype=torch.int64), torch.empty(0, COLUMNS, dtype=torch.float64))] * 3)
        run(optimizer, param, [(torch.tensor([1, 2]), torch.zeros(2, COLUMNS, dtype=torch.float64))] * 3)
        assert torch.equal(param, before)
        assert int(optimizer.state[param]["step"]) == 6

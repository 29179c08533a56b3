"""Runs that go on from very large counts of steps: right, or refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from rowstep import DeferredAdam, DeferredAdamW, SparseAdam
from tests.helpers.by_hand import AdamByHand
from tests.helpers.gradients import Snapshot, rows_of, table

pytestmark = pytest.mark.usefixtures("backend")

KINDS = pytest.mark.parametrize(
    ("kind", "options"),
    [
        (SparseAdam, {}),
        (SparseAdam, {"bias_correction": "row"}),
        (DeferredAdam, {}),
        (DeferredAdamW, {"weight_decay": 0.1}),
    ],
    ids=["SparseAdam", "by row", "DeferredAdam", "DeferredAdamW"],
)

LR, BETAS, EPS = 0.01, (0.9, 0.99), 1e-8


class Run:
    """A table and a dense parameter under an optimizer that was told how many steps it has taken."""

    def __init__(self, kind: Any, options: dict[str, Any], count: Any) -> None:
        self.kind, self.options = kind, options
        self.params = [table(6, 3, dtype=torch.float64), table(4, 2, dtype=torch.float64)]
        self.optimizer = self.made(self.params)
        decay = options.get("weight_decay", 0.0)
        rule: dict[str, Any] = {"weight_decay": decay, "decoupled_weight_decay": True}
        self.models = [AdamByHand(param, lr=LR, betas=BETAS, eps=EPS, **rule) for param in self.params]
        for model in self.models:
            model.steps = int(count)
        saved = self.optimizer.state_dict()
        for number, param in enumerate(self.params):
            zeros = torch.zeros_like(param)
            saved["state"][number] = {"step": count, "exp_avg": zeros, "exp_avg_sq": zeros.clone()}
            if options.get("bias_correction") == "row":
                saved["state"][number]["row_step"] = torch.full(param.shape[:1], int(count))
        self.optimizer.load_state_dict(saved)

    def made(self, params: list[Parameter]) -> Any:
        return self.kind(params, lr=LR, betas=BETAS, eps=EPS, **self.options)

    def give_gradients(self) -> None:
        ids = torch.randint(6, (2,))
        if isinstance(self.optimizer, DeferredAdam):
            self.optimizer.catch_up(self.params[0], ids)
        self.params[0].grad = rows_of(self.params[0], ids)
        self.params[1].grad = torch.randn_like(self.params[1])

    def step(self) -> None:
        self.give_gradients()
        self.optimizer.step()
        for param, model in zip(self.params, self.models, strict=True):
            assert param.grad is not None
            grad = param.grad.coalesce() if self.kind is SparseAdam and param.grad.is_sparse else param.grad.to_dense()
            model.step(*((grad.indices()[0], grad.values()) if grad.is_sparse else (range(len(grad)), grad)))

    def counts(self) -> list[int]:
        return [int(self.optimizer.state[param]["step"]) for param in self.params]

    def assert_right(self) -> None:
        self.optimizer.state_dict()  # no row waits any more
        for param, model in zip(self.params, self.models, strict=True):
            torch.testing.assert_close(param.detach(), model.p, rtol=1e-12, atol=1e-12)

    def save_and_load(self) -> None:
        """Go on with another optimizer, as after a restart."""
        saved = copy.deepcopy(self.optimizer.state_dict())
        self.optimizer = self.made(self.params)
        self.optimizer.load_state_dict(saved)


@KINDS
@pytest.mark.parametrize("count", [2**24 - 10, torch.tensor(2.0**24), 2**32 - 10], ids=str)
def test_a_run_goes_on_from_a_large_count(kind: Any, options: dict[str, Any], count: Any) -> None:
    """Also from a float32 count, as torch.optim.Adam saves it: there it stays at 2^24 for ever."""
    run = Run(kind, options, count)
    count = int(count)
    for number in range(1, 31):
        run.step()
        assert run.counts() == [count + number] * 2
        if number % 7 == 0:
            run.save_and_load()
    run.assert_right()
    if "bias_correction" in options:
        assert int(run.optimizer.state[run.params[0]]["row_step"].min()) > count


@KINDS
def test_a_count_ends_where_float64_ends_to_count(kind: Any, options: dict[str, Any]) -> None:
    run = Run(kind, options, 2**53 - 10)
    for number in range(1, 11):
        run.step()
        assert run.counts() == [2**53 - 10 + number] * 2
    run.assert_right()
    run.give_gradients()
    before = Snapshot(run.optimizer)
    with pytest.raises(
        ValueError, match=r"parameter 0 of group 0: its state 'step' is .*an integer step count in \[0, 2\^53\)"
    ):
        run.optimizer.step()
    before.assert_unchanged()
    with pytest.raises(ValueError, match=r"the loaded state of parameter 0: .*an integer step count in \[0, 2\^53\)"):
        run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))

"""The surface of a torch optimizer: how it is built, its groups, closures, learning rates, and six kinds of hooks."""

from __future__ import annotations

import inspect
import re
import typing
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import StateDict, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from rowstep import DeferredAdam, DeferredAdamW, SparseAdam
from rowstep._options import CHOICES
from tests.helpers.gradients import copy_of, rows_of, same_bits, sparse, step_with, table


def test_the_signature_begins_as_torchs_and_goes_on_with_keywords() -> None:
    ours = list(inspect.signature(SparseAdam).parameters.values())
    theirs = list(inspect.signature(torch.optim.SparseAdam).parameters.values())
    assert [(p.name, p.default) for p in ours[: len(theirs)]] == [(p.name, p.default) for p in theirs]
    assert {p.name: p.default for p in ours[len(theirs) :]} == {
        "weight_decay": 0.0, "decoupled_weight_decay": False, "amsgrad": False, "force_sparse": False,
        "bias_correction": "global", "nonfinite": "propagate", "second_moment": "element", "state_dtype": None,
        "stochastic_rounding": False, "seed": 0, "foreach": None, "fused": None, "capturable": False,
        "differentiable": False, "state_dir": None,
    }  # fmt: skip
    assert all(p.kind is p.KEYWORD_ONLY for p in ours[len(theirs) :])


def test_a_module_stands_for_its_named_parameters() -> None:
    users = nn.Embedding(3, 2, sparse=True)
    model = nn.ModuleDict({"users": users, "top": nn.Linear(2, 1)})
    optimizer = SparseAdam(model, lr=0.1)
    (group,) = optimizer.param_groups
    assert (group["params"], group["lr"]) == (list(model.parameters()), 0.1)
    with pytest.raises(IndexError, match=re.escape("parameter 0 of group 0 ('users.weight'): ")):
        step_with(optimizer, users.weight, sparse([[7]], torch.ones(1, 2), (3, 2), checked=False))
    # A state without names loads into one with names, and the other way round.
    plain = torch.optim.Adam(model.parameters())
    plain.load_state_dict(optimizer.state_dict())
    optimizer.load_state_dict(torch.optim.Adam(model.parameters()).state_dict())
    assert optimizer.param_groups[0]["param_names"] == ["users.weight", "top.weight", "top.bias"]


def test_step_returns_what_the_closure_returns(backend: str) -> None:
    param = table(4, 2)
    optimizer = SparseAdam([param])

    def closure() -> float:
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = param[1].square().sum()
        torch.autograd.backward(loss)
        return loss.item()

    expected = param[1].square().sum().item()
    before = param.detach().clone()
    with torch.no_grad():
        assert optimizer.step(closure) == expected
    assert not same_bits(param, before)
    assert optimizer.step() is None


@pytest.mark.usefixtures("backend")
class TestTensorLearningRate:
    @pytest.mark.parametrize(("shape", "dense"), [((), False), ((1,), False), ((), True), ((1, 1), True)], ids=str)
    def test_edits_in_place_count(self, shape: tuple[int, ...], dense: bool) -> None:
        param = Parameter(torch.zeros(2, 1))
        lr = torch.full(shape, 0.1)
        optimizer = SparseAdam([param], lr=lr)
        assert optimizer.param_groups[0]["lr"] is lr
        grad = torch.ones(2, 1) if dense else rows_of(param, [0, 1], 1.0)
        step_with(optimizer, param, grad)
        lr.fill_(0.5)
        step_with(optimizer, param, grad)
        assert param.flatten().tolist() == pytest.approx([-0.6, -0.6], rel=1e-5)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
    def test_the_step_size_is_computed_in_its_dtype(self, dtype: torch.dtype) -> None:
        ours = Parameter(torch.zeros(50, 4))
        theirs = copy_of(ours)
        lr = torch.tensor(0.0123, dtype=dtype)
        optimizer, reference = SparseAdam([ours], lr=lr), torch.optim.SparseAdam([theirs], lr=lr.clone())
        for _ in range(7):
            with torch.no_grad():
                ours.zero_(), theirs.zero_()
            grad = rows_of(ours, torch.randperm(50)[:20])
            step_with(optimizer, ours, grad)
            step_with(reference, theirs, grad)
            torch.testing.assert_close(ours, theirs, rtol=4 * 2**-23, atol=0)


@pytest.mark.parametrize("cls", [SparseAdam, DeferredAdamW])
def test_an_array_of_one_number_as_lr(cls: Any) -> None:
    """torch takes it, and an edit in place counts there as well."""
    params = [Parameter(torch.ones(2, 1)) for _ in range(2)]
    lr = np.array(0.1)
    ours, expected = cls(params[:1], lr=lr), cls(params[1:], lr=0.1)
    for rate in (0.1, 0.25):
        lr[...] = expected.param_groups[0]["lr"] = rate
        for param, optimizer in zip(params, (ours, expected), strict=True):
            step_with(optimizer, param, rows_of(param, [0, 1], 1.0))
    assert same_bits(*params)


@pytest.mark.parametrize("cls", [SparseAdam, DeferredAdam, DeferredAdamW])
def test_the_words_that_an_option_takes_are_its_type(cls: Any) -> None:
    """Editors complete them. And mypy would find the comments below unused if it took any str."""
    hints = typing.get_type_hints(cls.__init__)
    of_words = {name: words for name, words in CHOICES.items() if isinstance(words[0], str) and name in hints}
    assert {name: typing.get_args(hints[name]) for name in of_words} == of_words
    assert "second_moment" in of_words
    with pytest.raises(ValueError, match="expected 'element' or 'row'"):
        SparseAdam([table(2, 2)], second_moment="rows")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected 'element' or 'row'"):
        DeferredAdam([table(2, 2)], second_moment="rows")  # type: ignore[arg-type]


@pytest.fixture
def optimizer() -> SparseAdam:
    param = table(4, 2)
    param.grad = rows_of(param, [1])
    return SparseAdam([param])


def test_step_hooks_run_before_and_after_the_step_until_removed(optimizer: SparseAdam, backend: str) -> None:
    (param,) = optimizer.param_groups[0]["params"]
    start = param.detach().clone()
    seen: list[tuple[str, bool]] = []

    def before(self: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert self is optimizer
        seen.append(("before", same_bits(param, start)))

    def after(self: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(("after", same_bits(param, start)))

    handles = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
    optimizer.step()
    assert seen == [("before", True), ("after", False)]
    for handle in handles:
        handle.remove()
    optimizer.step()
    assert len(seen) == 2


def test_global_hooks_run_too_and_a_pre_hook_may_replace_the_arguments(optimizer: SparseAdam) -> None:
    seen: list[str] = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: seen.append("before")),
        register_optimizer_step_post_hook(lambda *_: seen.append("after")),
    ]
    optimizer.step()
    for handle in handles:
        handle.remove()
    assert seen == ["before", "after"]
    optimizer.register_step_pre_hook(lambda self, args, kwargs: ((self,), {"closure": lambda: 42.0}))
    assert optimizer.step(lambda: 1.0) == 42.0


def test_a_state_dict_hook_may_replace_the_result(optimizer: SparseAdam) -> None:
    """Before the states of sharded tables are made whole. In which order hooks run is torch's own code."""
    seen: list[str] = []
    optimizer.register_state_dict_pre_hook(lambda self: seen.append("before"))
    optimizer.register_state_dict_post_hook(lambda self, saved: {**saved, "mine": 1})
    assert optimizer.state_dict()["mine"] == 1
    assert seen == ["before"]


def test_load_hooks_run_in_order_until_removed_and_see_a_complete_state(backend: str) -> None:
    param = table(4, 2, dtype=torch.bfloat16)
    optimizer = SparseAdam([param], bias_correction="row")
    step_with(optimizer, param, rows_of(param, [1]))
    saved = optimizer.state_dict()
    del saved["param_groups"][0]["weight_decay"]
    seen: list[Any] = []

    def replace(self: Optimizer, given: StateDict) -> StateDict:
        seen.append("before")
        return {**given, "param_groups": [{**group, "lr": 0.75} for group in given["param_groups"]]}

    def look(self: Optimizer) -> None:
        group = self.param_groups[0]
        seen.append((self.state[param]["row_step"].dtype, group["weight_decay"], group["lr"]))

    handles = [
        optimizer.register_load_state_dict_pre_hook(replace),
        optimizer.register_load_state_dict_pre_hook(lambda self, given: seen.append("before, first"), prepend=True),
        optimizer.register_load_state_dict_post_hook(look),
        optimizer.register_load_state_dict_post_hook(lambda self: seen.append("after, first"), prepend=True),
    ]
    for _ in range(2):
        optimizer.load_state_dict(saved)
        for handle in handles:
            handle.remove()
    assert seen == ["before, first", "before", "after, first", (torch.int64, 0.0, 0.75)]

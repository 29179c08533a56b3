"""State that is kept by the row or in 16 bits, saved and loaded: into itself, and from torch's classes."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict_saver

from rowstep import DeferredAdam, SparseAdam, distributed
from tests.helpers.copies import pickled, through_a_file
from tests.helpers.gradients import Snapshot, rows_of


@pytest.fixture(autouse=True)
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is saved and loaded does not depend on who computed it, and every kind of state is a kernel to compile."""
    monkeypatch.setenv("ROWSTEP_BACKEND", "reference")


KINDS: dict[str, dict[str, Any]] = {
    "row": {"second_moment": "row"},
    "row, bfloat16": {"second_moment": "row", "state_dtype": torch.bfloat16},
    "row, no first moment": {"second_moment": "row", "betas": (0.0, 0.99)},
    "bfloat16": {"state_dtype": torch.bfloat16},
    "float16, amsgrad": {"state_dtype": torch.float16, "amsgrad": True},
    "float32 of bfloat16": {"state_dtype": torch.float32},
    "random weights": {"state_dtype": torch.bfloat16, "stochastic_rounding": True, "seed": 2**63 - 1},
}


def made(kind: Any, name: str, *, steps: int = 6, **more: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if name in ("float32 of bfloat16", "random weights") else torch.float32
    model = nn.ModuleDict(
        {"table": nn.Embedding(20, 3, sparse=True, dtype=dtype), "dense": nn.Linear(3, 2, dtype=dtype)}
    )
    optimizer = kind(model.parameters(), **({"lr": 0.01} | KINDS[name] | more))
    train(model, optimizer, range(steps))
    return model, optimizer


def train(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        ids = torch.randint(20, (7,), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model["dense"](model["table"](ids)).float().square().sum().backward()
        optimizer.step()


def assert_same(one: Any, other: Any) -> None:
    states = one.state_dict()["state"], other.state_dict()["state"]
    assert states[0].keys() == states[1].keys()
    for number, state in states[0].items():
        assert state.keys() == states[1][number].keys()
        for key, value in state.items():
            loaded = torch.as_tensor(states[1][number][key])
            assert torch.equal(torch.as_tensor(value), loaded)
            assert torch.as_tensor(value).dtype == loaded.dtype


@pytest.mark.parametrize("kind", [SparseAdam, DeferredAdam])
@pytest.mark.parametrize("name", KINDS)
def test_a_state_loads_into_itself_bit_for_bit_and_goes_on(kind: Any, name: str) -> None:
    model, optimizer = made(kind, name)
    saved = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    loaded_model, loaded = made(kind, name, steps=0, seed=5, lr=0.5)
    loaded_model.load_state_dict(saved["model"])
    loaded.load_state_dict(saved["optimizer"])
    assert_same(optimizer, loaded)
    copies = [(loaded_model, loaded), pickled((model, optimizer)), copy.deepcopy((model, optimizer))]
    train(model, optimizer, range(6, 10))
    for copied, its_optimizer in copies:
        train(copied, its_optimizer, range(6, 10))
        assert torch.equal(copied["table"].weight, model["table"].weight)
        assert_same(optimizer, its_optimizer)


@pytest.mark.parametrize(
    ("kind", "name"),
    [(DeferredAdam, "row, bfloat16"), (DeferredAdam, "random weights"), (SparseAdam, "random weights")],
)
def test_kernels_go_on_from_a_loaded_state_too(kind: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROWSTEP_BACKEND", "numba")
    test_a_state_loads_into_itself_bit_for_bit_and_goes_on(kind, name)


@pytest.mark.parametrize("name", ["row", "bfloat16"])
@pytest.mark.parametrize("kind", [SparseAdam, DeferredAdam])
def test_the_state_of_a_torch_class_is_reduced_at_the_next_step_and_a_warning_says_so(kind: Any, name: str) -> None:
    torch.manual_seed(0)
    param = nn.Parameter(torch.randn(20, 3))
    theirs = torch.optim.Adam([param], lr=0.01)
    for _ in range(3):
        param.grad = torch.randn(20, 3)
        theirs.step()
    optimizer = kind([param], lr=0.01, **KINDS[name])
    loaded = copy.deepcopy(theirs.state_dict())
    loaded["param_groups"][0]["betas"] = optimizer.param_groups[0]["betas"]
    optimizer.load_state_dict(loaded)
    assert optimizer.param_groups[0]["second_moment"] == KINDS[name].get("second_moment", "element")
    second = theirs.state[param]["exp_avg_sq"]
    param.grad = rows_of(param, [3], 0.0)
    with pytest.warns(
        UserWarning, match="parameter 0 of group 0: .*(reduced to its mean over each row|rounded to torch.bfloat16)"
    ):
        optimizer.step()
    state = optimizer.state_dict()["state"][0]
    if name == "bfloat16":
        assert state["exp_avg_sq"].dtype == torch.bfloat16
        torch.testing.assert_close(state["exp_avg_sq"].float(), second, rtol=0.02, atol=0)
    else:
        decay = 1.0 if kind is SparseAdam else optimizer.param_groups[0]["betas"][1]
        torch.testing.assert_close(state["exp_avg_sq_row"][5:], second.mean(dim=1)[5:] * decay)


@pytest.mark.parametrize("name", ["row, bfloat16", "row, no first moment"])
@pytest.mark.parametrize("into", ["the same", "row"])
def test_through_a_distributed_checkpoint(name: str, into: str, tmp_path: Path) -> None:
    """The state that was saved is loaded, whatever else the optimizer was made with: its options come with it."""
    model, optimizer = made(SparseAdam, name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, that there is no process group
        state_dict_saver.save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path, no_dist=True)
    options = KINDS[name] if into == "the same" else {"second_moment": into}
    torch.manual_seed(1)
    other: Any = nn.ModuleDict({"table": nn.Embedding(20, 3, sparse=True), "dense": nn.Linear(3, 2)})
    loaded = SparseAdam(other.parameters(), **options)
    refused, before = SparseAdam(other.parameters()), other["table"].weight.detach().clone()
    with pytest.raises(ValueError, match="Create the optimizer with second_moment='row'"):
        distributed.load({"model": other, "optimizer": refused}, tmp_path, no_dist=True)
    assert torch.equal(other["table"].weight, before)
    distributed.load({"model": other, "optimizer": loaded}, tmp_path, no_dist=True)
    assert loaded.param_groups[0]["second_moment"] == KINDS[name]["second_moment"]
    train(model, optimizer, range(6, 9))
    train(other, loaded, range(6, 9))
    assert torch.equal(other["table"].weight, model["table"].weight)
    assert_same(optimizer, loaded)


@pytest.mark.parametrize("kind", [SparseAdam, DeferredAdam])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_state_per_row_does_not_load_where_one_per_element_is_kept(kind: Any, steps: int) -> None:
    """It is not written out for every weight, and the optimizer does not become one that keeps it."""
    _, optimizer = made(kind, "row")
    model, other = made(kind, "bfloat16", steps=steps)
    before = Snapshot(other)
    with pytest.raises(ValueError, match=r"the loaded state.*exp_avg_sq_row.*expected.*second_moment=.row"):
        other.load_state_dict(optimizer.state_dict())
    before.assert_unchanged()
    assert other.param_groups[0]["second_moment"] == "element"
    train(model, other, range(2))


@pytest.mark.parametrize("kind", [SparseAdam, DeferredAdam])
def test_a_state_per_element_is_reduced_to_rows_whoever_saved_it(kind: Any) -> None:
    _, optimizer = made(kind, "bfloat16")
    model, other = made(kind, "row")
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["second_moment"] == "row"
    words = "second_moment='row'.*reduced to its mean over each row"
    with pytest.warns(UserWarning, match=words):
        train(model, other, range(1))
    assert "exp_avg_sq_row" in other.state[model["table"].weight]
    sharded = distributed.ShardedEmbedding(20, 3)  # which has its state before it steps
    optimizer = kind(sharded)
    sharded(torch.tensor([1])).sum().backward()
    optimizer.step()
    other = kind(distributed.ShardedEmbedding(20, 3), second_moment="row")
    with pytest.warns(UserWarning, match=words):
        other.load_state_dict(optimizer.state_dict())


BAD: list[tuple[str, Any, str]] = [
    ("exp_avg_sq_row", torch.zeros(19), r"'exp_avg_sq_row' is \(19,\) .*; expected shape \(20,\)"),
    ("exp_avg_sq_row", torch.zeros(20, dtype=torch.int64), "expected a 16-, 32- or 64-bit floating-point dtype"),
    ("exp_avg_sq_row", "text", "'exp_avg_sq_row' is 'text'; expected a dense tensor"),
    ("step", None, "but no 'step'; expected both"),
]


@pytest.mark.parametrize(("key", "value", "message"), BAD, ids=str)
def test_a_state_that_does_not_fit_is_refused(key: str, value: Any, message: str) -> None:
    """When it is loaded, and when somebody has put it into the state."""
    model, optimizer = made(SparseAdam, "row, no first moment")
    saved = optimizer.state_dict()
    state = saved["state"][0] = dict(saved["state"][0])
    del state[key]
    if value is not None:
        state[key] = value
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    optimizer.state[model["table"].weight] = state
    before = model["table"].weight.detach().clone()
    with pytest.raises(ValueError, match=r"parameter 0 of group 0: its state .*expected"):
        train(model, optimizer, range(1))
    assert torch.equal(model["table"].weight, before)

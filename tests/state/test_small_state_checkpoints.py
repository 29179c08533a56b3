"""State that is kept by the row or in 16 bits, saved and loaded: into itself, from torch's classes, and into them."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict_saver

from rowstep import DeferredAdam, SparseAdam, checkpoint, distributed
from tests.helpers.gradients import rows_of


@pytest.fixture(autouse=True)
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is saved and loaded does not depend on who computed it, and every kind of state is a kernel to compile."""
    monkeypatch.setenv("ROWSTEP_BACKEND", "reference")


KINDS: dict[str, dict[str, Any]] = {
    "row": {"second_moment": "row"},
    "row, bfloat16": {"second_moment": "row", "state_dtype": torch.bfloat16},
    "row, no first moment": {"second_moment": "row", "betas": (0.0, 0.99)},
    "factored": {"second_moment": "factored", "betas": (0.0, 0.99)},
    "bfloat16": {"state_dtype": torch.bfloat16},
    "float16, amsgrad": {"state_dtype": torch.float16, "amsgrad": True},
    "float32 of bfloat16": {"state_dtype": torch.float32},
}


def made(kind: Any, name: str, *, steps: int = 6, **more: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if name == "float32 of bfloat16" else torch.float32
    model = nn.ModuleDict(
        {"table": nn.Embedding(20, 3, sparse=True, dtype=dtype), "dense": nn.Linear(3, 2, dtype=dtype)}
    )
    optimizer = kind(model.parameters(), lr=0.01, **(KINDS[name] | more))
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
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    loaded_model, loaded = made(kind, name, steps=0)
    loaded_model.load_state_dict(saved["model"])
    loaded.load_state_dict(saved["optimizer"])
    assert_same(optimizer, loaded)
    copies = [(loaded_model, loaded), pickle.loads(pickle.dumps((model, optimizer))), copy.deepcopy((model, optimizer))]
    train(model, optimizer, range(6, 10))
    for copied, its_optimizer in copies:
        train(copied, its_optimizer, range(6, 10))
        assert torch.equal(copied["table"].weight, model["table"].weight)
        assert_same(optimizer, its_optimizer)


def test_kernels_go_on_from_a_loaded_state_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROWSTEP_BACKEND", "numba")
    test_a_state_loads_into_itself_bit_for_bit_and_goes_on(DeferredAdam, "row, bfloat16")


@pytest.mark.parametrize("name", ["row", "factored", "bfloat16"])
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
    with pytest.warns(UserWarning, match="parameter 0 of group 0: its state was made to fit second_moment"):
        optimizer.step()
    state = optimizer.state_dict()["state"][0]
    if name == "bfloat16":
        assert state["exp_avg_sq"].dtype == torch.bfloat16
        torch.testing.assert_close(state["exp_avg_sq"].float(), second, rtol=0.02, atol=0)
    else:
        decay = 1.0 if kind is SparseAdam else optimizer.param_groups[0]["betas"][1]
        torch.testing.assert_close(state["exp_avg_sq_row"][5:], second.mean(dim=1)[5:] * decay)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("kind", [SparseAdam, DeferredAdam])
def test_a_state_goes_to_torch_written_out(kind: Any, name: str) -> None:
    model, optimizer = made(kind, name)
    before = copy.deepcopy(optimizer.state_dict())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        state_dict = checkpoint.to_torch(optimizer)
    words = "; ".join(str(warning.message) for warning in said)
    assert "parameter 0 of group 0" in words
    assert ("written out" in words) == ("second_moment" in KINDS[name])
    assert ("'exp_avg' begins with 0" in words) == (KINDS[name].get("betas", (1, 1))[0] == 0)
    assert ("becomes" in words) == ("state_dtype" in KINDS[name])
    for key, value in before["state"][0].items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(optimizer.state_dict()["state"][0][key]))
    for torchs in (torch.optim.Adam, torch.optim.AdamW):
        theirs = torchs(model.parameters(), amsgrad=KINDS[name].get("amsgrad", False))
        theirs.load_state_dict(copy.deepcopy(state_dict))
        for param in model.parameters():
            param.grad = torch.ones_like(param)
            assert all(slot.dtype == param.dtype for key, slot in theirs.state[param].items() if key != "step")
        theirs.step()
    masked: Any = torch.optim.SparseAdam([model["table"].weight])
    only = {"state": {0: state_dict["state"][0]}, "param_groups": [state_dict["param_groups"][0] | {"params": [0]}]}
    masked.load_state_dict(copy.deepcopy(only))
    model["table"].weight.grad = rows_of(model["table"].weight, [1, 2])
    masked.step()
    if KINDS[name].get("second_moment") == "factored":
        state = before["state"][0]
        mean = state["exp_avg_sq_row"].double().mean()
        expected = state["exp_avg_sq_row"].double().unsqueeze(1) * state["exp_avg_sq_column"] / mean
        torch.testing.assert_close(state_dict["state"][0]["exp_avg_sq"].double(), expected, rtol=1e-5, atol=0)


def test_only_our_optimizers_go_to_torch() -> None:
    with pytest.raises(TypeError, match=r"the optimizer is a Adam; expected rowstep\.SparseAdam"):
        checkpoint.to_torch(torch.optim.Adam([nn.Parameter(torch.ones(1))]))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["row, bfloat16", "row, no first moment", "factored"])
@pytest.mark.parametrize("into", ["the same", "element", "row"])
def test_through_a_distributed_checkpoint(name: str, into: str, tmp_path: Path) -> None:
    """The state that was saved is loaded, whatever the optimizer was made with: its options come with it."""
    model, optimizer = made(SparseAdam, name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, that there is no process group
        state_dict_saver.save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path, no_dist=True)
    options = KINDS[name] if into == "the same" else {"second_moment": into}
    torch.manual_seed(1)
    other: Any = nn.ModuleDict({"table": nn.Embedding(20, 3, sparse=True), "dense": nn.Linear(3, 2)})
    loaded = SparseAdam(other.parameters(), **options)
    distributed.load({"model": other, "optimizer": loaded}, tmp_path, no_dist=True)
    assert loaded.param_groups[0]["second_moment"] == KINDS[name]["second_moment"]
    train(model, optimizer, range(6, 9))
    train(other, loaded, range(6, 9))
    assert torch.equal(other["table"].weight, model["table"].weight)
    assert_same(optimizer, loaded)


BAD: list[tuple[str, Any, str]] = [
    ("exp_avg_sq_row", torch.zeros(19), r"'exp_avg_sq_row' is \(19,\) .*; expected shape \(20,\)"),
    ("exp_avg_sq_row", torch.zeros(20, dtype=torch.int64), "expected a 16-, 32- or 64-bit floating-point dtype"),
    ("exp_avg_sq_row", None, "has 'exp_avg_sq_column' but no 'exp_avg_sq_row'"),
    ("exp_avg_sq_column", torch.zeros(4), r"'exp_avg_sq_column' is \(4,\) .*; expected shape \(3,\)"),
    ("exp_avg_sq_column", "text", "'exp_avg_sq_column' is 'text'; expected a dense tensor"),
    ("exp_avg_sq_sum", torch.zeros(1), r"'exp_avg_sq_sum' is \(1,\) .*; expected shape \(\)"),
    ("exp_avg_sq_sum", None, "but no 'exp_avg_sq_sum'; expected both"),
    ("step", None, "but no 'step'; expected both"),
]


@pytest.mark.parametrize(("key", "value", "message"), BAD, ids=str)
def test_a_state_that_does_not_fit_is_refused(key: str, value: Any, message: str) -> None:
    _, optimizer = made(SparseAdam, "factored")
    state_dict = optimizer.state_dict()
    state_dict["state"][0] = dict(state_dict["state"][0])
    state_dict["state"][0].pop(key)
    if value is not None:
        state_dict["state"][0][key] = value
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state_dict)

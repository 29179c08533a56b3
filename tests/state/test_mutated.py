"""State dicts and states that something was done to: they are refused as a whole, or what they load steps as it should.

`make stress` tries 10,000 of each kind for each optimizer.
"""

from __future__ import annotations

import copy
import warnings
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from rowstep import DeferredAdam, DeferredAdamW, SparseAdam
from rowstep._state import miscount
from tests.helpers.deferred_cases import LONG
from tests.helpers.gradients import bits, rows_of, table
from tests.helpers.state_mutations import StateDict, can_be_read, changed, changed_state

pytestmark = pytest.mark.usefixtures("backend")

# On each of the two backends.
COUNT = 5_000 if LONG else 75

# What float32 cannot square. It overflows there, and the equations in float64 do not.
LARGE = 1e19

ROWS = {0: [1, 4, 1], 2: [0, 2]}
"""For each table, the rows of its gradient. Parameter 1 has a dense one."""

# torch's own words, from before anything is loaded: for groups that do not match, flags and values that are not ours.
TORCHS = ("loaded state dict", "Boolean value of Tensor", "Cannot copy out of meta tensor", "item() cannot be called")
OURS = ("expected", "be deferred", "deferred steps need", "1-element")


def made(kind: type[SparseAdam | DeferredAdam], steps: int) -> tuple[Any, list[Parameter]]:
    """An optimizer of two tables and a dense parameter, in two groups, after some steps."""
    params = [table(6, 3), table(4, 3), table(5, 2)]
    second: dict[str, Any] = {"params": params[2:], "amsgrad": True}
    if kind is SparseAdam:
        second["bias_correction"] = "row"
    optimizer = kind([{"params": params[:2]}, second], lr=0.01)
    for _ in range(steps):
        give_gradients(optimizer, params)
        optimizer.step()
    return optimizer, params


def give_gradients(optimizer: Optimizer, params: list[Parameter]) -> None:
    for number, param in enumerate(params):
        if number not in ROWS:
            param.grad = torch.randn_like(param)
        else:
            if isinstance(optimizer, DeferredAdam):
                optimizer.catch_up(param, torch.tensor(ROWS[number]))
            param.grad = rows_of(param, ROWS[number])


def groups_of(optimizer: Optimizer) -> list[str]:
    return [repr({**group, "params": len(group["params"])}) for group in optimizer.param_groups]


class Whole:
    """All of an optimizer as it was, options included; a state may hold anything."""

    def __init__(self, optimizer: Optimizer, params: list[Parameter]) -> None:
        self._optimizer, self._params = optimizer, params
        self._before = self._everything()

    def _everything(self) -> list[Any]:
        found: list[Any] = [groups_of(self._optimizer), list(self._optimizer.state)]
        for param in self._params:
            found += [bits(param).tolist(), param._version]
            for key, value in self._optimizer.state.get(param, {}).items():
                found += [key, id(value), _content(value)]
        return found

    def assert_unchanged(self) -> None:
        assert self._everything() == self._before


def _content(value: object) -> object:
    """What can be compared of a value: of tensors with memory the bytes."""
    if not isinstance(value, Tensor):
        return repr(value)
    return value.contiguous().reshape(-1).view(torch.uint8).tolist() if can_be_read(value) else "no numbers"


Array = npt.NDArray[np.float64]


def as_array(value: Any) -> Array:
    array: Array = value.detach().double().numpy().copy()
    return array


def expected_weights(param: Tensor, state: dict[str, Any], group: dict[str, Any], touched: list[int] | None) -> Array:
    """The weights after one more step, by the equations; ``touched`` are the rows that move, or None for all."""
    beta1, beta2 = (float(beta) for beta in group["betas"])
    lr, decay, eps = float(group["lr"]), float(group["weight_decay"]), float(group["eps"])
    assert param.grad is not None
    p, g = as_array(param), as_array(param.grad.to_dense())
    m, v, u = (as_array(state[key]) if key in state else 0 * p for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"))
    count: Any = float(state.get("step", 0)) + 1
    if touched is not None and group.get("bias_correction") == "row":
        count = as_array(state["row_step"])[:, None] + 1 if "row_step" in state else by_history(v, count)
    g = -g if group["maximize"] else g
    if group["decoupled_weight_decay"]:
        before, p = p, p * (1 - lr * decay)
    else:
        before, g = p, g + decay * p
    with np.errstate(over="ignore", invalid="ignore"):  # as torch writes it: infinity stays no longer than a step
        m, v = m + (g - m) * (1 - beta1), v + (g * g - v) * (1 - beta2)
    v = np.maximum(u, v) if group["amsgrad"] else v
    root = np.sqrt(1 - beta2**count)
    # torch.optim.SparseAdam adds eps before the bias is corrected, torch.optim.Adam after.
    added = eps if touched is not None else eps * root
    with np.errstate(divide="ignore", invalid="ignore"):  # a second moment may be negative
        moved: Array = p - lr * root / (1 - beta1**count) * m / (np.sqrt(v) + added)
    if touched is not None:
        still = np.setdiff1d(np.arange(len(p)), touched)
        moved[still] = before[still]
    return moved


def by_history(v: Array, count: float) -> Array:
    """Counts per row that begin now: rows with a second moment have taken all steps so far."""
    return np.where(v.any(axis=1), count - 1, 0.0)[:, None] + 1


def can_be_stepped(param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> bool:
    """Whether there are numbers to compute with. If not, a step must be refused."""
    moments = [state[key] for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if key in state]
    if not all(can_be_read(moment) and moment.shape == param.shape and not moment.is_complex() for moment in moments):
        return False
    if "row_step" in state and not (can_be_read(state["row_step"]) and state["row_step"].dtype == torch.int64):
        return False
    counts_rows = group.get("bias_correction") == "row" and "row_step" in state
    if counts_rows and state["row_step"].shape != param.shape[:1]:
        return False
    return miscount(state.get("step", 0)) is None


def step_is_refused_or_right(optimizer: Any, params: list[Parameter]) -> bool:
    """Take a step. If it is refused, that is said with a parameter's name, and nothing has changed."""
    groups = [optimizer.param_groups[0], optimizer.param_groups[0], optimizer.param_groups[1]]
    deferred = isinstance(optimizer, DeferredAdam)
    before = Whole(optimizer, params)
    expected = None
    operands = [(p, optimizer.state.get(p, {}), group) for p, group in zip(params, groups, strict=True)]
    if all(can_be_stepped(*each) for each in operands):
        touched = [None if deferred else ROWS.get(number) for number in range(len(params))]
        expected = [expected_weights(*each, rows) for each, rows in zip(operands, touched, strict=True)]
    refusal = ""
    try:
        optimizer.step()
    except (TypeError, ValueError) as error:
        refusal = str(error)
    if refusal:
        before.assert_unchanged()
        assert "expected" in refusal
        assert "parameter " in refusal or "in group" in refusal
        return False
    assert expected is not None
    if deferred:
        optimizer.flush()
    for (param, _, group), weights in zip(operands, expected, strict=True):
        if max(float(group["lr"]), group["eps"], group["weight_decay"]) < LARGE:
            within = np.isfinite(weights) & (np.abs(weights) < LARGE)
            now = optimizer.state[param]
            atol = 1e-5 if now["exp_avg"].itemsize >= 4 and now["exp_avg_sq"].itemsize >= 4 else 1e-3
            np.testing.assert_allclose(as_array(param)[within], weights[within], rtol=1e-3, atol=atol)
    return True


def load_is_refused(optimizer: Any, params: list[Parameter], saved: StateDict) -> bool:
    """Load this. If it is refused, that is said in words, and nothing has changed."""
    before, refusal = Whole(optimizer, params), ""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Casting complex values")  # torch's, of values that are not ours
            optimizer.load_state_dict(saved)
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        refusal = str(error)
    if refusal:
        before.assert_unchanged()
        assert any(words in refusal for words in (*OURS, *TORCHS)), refusal
    return bool(refusal)


KINDS = pytest.mark.parametrize("kind", [SparseAdam, DeferredAdam, DeferredAdamW])


@KINDS
def test_state_dicts_are_refused_or_step_as_they_should(kind: type[SparseAdam | DeferredAdam], backend: str) -> None:
    torch.manual_seed(0)
    saved, refused = made(kind, 3)[0].state_dict(), 0
    optimizer, params = made(kind, 2)
    for number in numbers_for(backend):
        random = Random(number)
        mutated = copy.deepcopy(saved)
        changed(mutated, params, random)
        if load_is_refused(optimizer, params, mutated):
            refused += 1
        else:
            give_gradients(optimizer, params)
            step_is_refused_or_right(optimizer, params)
            optimizer, params = made(kind, 2)
    assert COUNT / 2 < refused < COUNT


@KINDS
def test_states_changed_by_hand_are_refused_or_step_as_they_should(
    kind: type[SparseAdam | DeferredAdam], backend: str
) -> None:
    refused = 0
    for number in numbers_for(backend):
        random = Random(number)
        optimizer, params = made(kind, 2)
        states = [optimizer.state[param] for param in params]
        changed_state(random.choice(states), states, params, random)
        give_gradients(optimizer, params)
        refused += not step_is_refused_or_right(optimizer, params)
    assert COUNT / 2 < refused < COUNT


def numbers_for(backend: str) -> range:
    """The seeds of its mutations: each backend has others."""
    return range(COUNT) if backend == "reference" else range(COUNT, 2 * COUNT)

"""A state that is wrong in a way that has a name: refused with what was found and expected, before anything changes.

Each flaw is tried where it comes in: in a state dict that is loaded, and in a state that is edited in mid-run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rowstep import DeferredAdam, SparseAdam
from tests.helpers.deferred_cases import LONG
from tests.helpers.gradients import rows_of
from tests.helpers.state_runs import KINDS, Kind, Run, State, assert_refused


def put(**values: Any) -> Callable[[State], None]:
    return lambda state: state.update(values)


def drop(*keys: str) -> Callable[[State], None]:
    def change(state: State) -> None:
        for key in keys:
            del state[key]

    return change


def alter(key: str, how: Callable[[Tensor], Any]) -> Callable[[State], None]:
    return lambda state: state.update({key: how(state[key])})


COUNTS: list[Any] = [
    -1, math.nan, math.inf, None, 2.5, 2**53, 10**400, True, "3", 1j, torch.tensor(-1.0), torch.tensor(math.nan),
    torch.tensor(2**60), torch.tensor([1.0, 2.0]), torch.empty((), device="meta"), torch.tensor(3.0).to_sparse(),
]  # fmt: skip

MOMENT_FLAWS: dict[str, Callable[[Tensor], Any]] = {
    "truncated": lambda moment: moment[:-1].clone(),
    "longer": lambda moment: torch.cat([moment, moment]),
    "flat": lambda moment: moment.reshape(-1),
    "transposed": lambda moment: moment.t(),
    "integers": lambda moment: moment.to(torch.int32),
    "complex": lambda moment: moment.to(torch.complex64),
    "8 bits": lambda moment: moment.to(torch.float8_e4m3fn),
    "sparse": lambda moment: moment.to_sparse(),
    "on meta": lambda moment: moment.to("meta"),
    "expanded": lambda moment: moment[:1].expand(6, 3),
    "overlapping": lambda moment: torch.ones(8).as_strided((6, 3), (1, 1)),
    "None": lambda moment: None,
    "a number": lambda moment: 0.5,
    "a list": lambda moment: moment.tolist(),
    "an array": lambda moment: moment.numpy(),
}

FLAWS: dict[str, tuple[Callable[[State], None], str]] = {
    **{f"step is {count!r}"[:40]: (put(step=count), "'step' is .*expected an integer step count") for count in COUNTS},
    **{
        f"{key} {name}": (alter(key, how), f"'{key}' is .*expected")
        for at, key in enumerate(("exp_avg", "exp_avg_sq", "max_exp_avg_sq"))
        for name, how in list(MOMENT_FLAWS.items())[at :: 1 if LONG or at == 0 else 4]
    },
    "no exp_avg": (drop("exp_avg"), "has 'exp_avg_sq' but no 'exp_avg'; expected both"),
    "no exp_avg_sq": (drop("exp_avg_sq"), "has 'exp_avg' but no 'exp_avg_sq'; expected both"),
    "no step": (drop("step"), "has 'exp_avg' but no 'step'; expected both"),
    "nothing but a maximum": (drop("step", "exp_avg", "exp_avg_sq"), "has 'max_exp_avg_sq' but no 'exp_avg'"),
    "one for two": (lambda state: state.update(exp_avg_sq=state["exp_avg"]), "'exp_avg.*shares? memory.*expected"),
    "one in all": (lambda state: state.update(max_exp_avg_sq=state["exp_avg_sq"]), "_sq'.*shares? memory.*expected"),
}


@KINDS
@pytest.mark.parametrize("flaw", FLAWS)
def test_a_flaw_is_refused_when_it_is_loaded(kind: Kind, flaw: str) -> None:
    run = Run(kind)
    saved = run.saved()
    change, message = FLAWS[flaw]
    change(saved["state"][2])
    assert_refused(run, lambda: run.optimizer.load_state_dict(saved), f"the loaded state.*{message}")
    run.step()


@KINDS
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("flaw", FLAWS)
def test_a_flaw_is_refused_by_the_next_step(kind: Kind, flaw: str) -> None:
    """Before the parameters that come first have moved, and with the name of the one whose state it is."""
    run = Run(kind)
    change, message = FLAWS[flaw]
    state = run.optimizer.state[run.last]
    whole = dict(state)
    if isinstance(run.optimizer, DeferredAdam):
        run.optimizer.flush()  # what waits would be settled before a state that somebody has replaced is looked at
    change(state)
    weights = [param.detach().clone() for _, param in run.params]
    with pytest.raises(ValueError, match=rf"parameter 2 of group 0 \('last'\): .*{message}"):
        run.step()
    for (_, param), before in zip(run.params, weights, strict=True):
        assert torch.equal(param, before)
    assert int(run.optimizer.state[run.params[0][1]]["step"]) == 1
    state.clear()
    state.update(whole)
    run.step()
    assert [int(run.optimizer.state[param]["step"]) for _, param in run.params] == [2, 2, 2]


@KINDS
@pytest.mark.usefixtures("backend")
def test_a_moment_whose_memory_is_freed_is_refused_by_the_next_step(kind: Kind) -> None:
    """As packages do that move a state out of the way between two steps; for tables, kernels/test_operands.py."""
    run = Run(kind)
    run.optimizer.state_dict()  # no row waits
    before = run.params[0][1].detach().clone()
    run.optimizer.state[dict(run.params)["dense"]]["exp_avg"].untyped_storage().resize_(0)
    for param in (param for _, param in run.params):
        param.grad = rows_of(param, [1], 1.0) if param.shape == (6, 3) else torch.ones_like(param)
    with pytest.raises(ValueError, match=r"\('dense'\): .*storage of its state 'exp_avg' is too small for its"):
        run.optimizer.step()
    assert torch.equal(run.params[0][1], before)


COUNTS_PER_ROW: dict[str, tuple[Tensor, str]] = {
    "bool": (torch.ones(6, dtype=torch.bool), "dense tensor of int64"),
    "float16 beyond its whole numbers": (torch.full((6,), 2048, dtype=torch.float16), r"in \[0, 2048\)"),
    "negative": (torch.tensor([0, 1, -1, 0, 0, 0]), r"in \[0, "),
    "NaN": (torch.tensor([0, 1, math.nan, 0, 0, 0]), r"in \[0, "),
    "halves": (torch.full((6,), 0.5), r"in \[0, "),
    "2**60": (torch.full((6,), 2**60), r"in \[0, "),
    "too many": (torch.ones(7, dtype=torch.int64), r"shape \(6,\)"),
    "sparse": (torch.ones(6, dtype=torch.int64).to_sparse(), "dense"),
    "meta": (torch.ones(6, dtype=torch.int64, device="meta"), "a tensor with data"),
}


@pytest.mark.parametrize("flaw", COUNTS_PER_ROW)
def test_invalid_counts_per_row_are_refused(flaw: str) -> None:
    run = Run(SparseAdam)
    saved = run.saved()
    saved["state"][2]["row_step"], message = COUNTS_PER_ROW[flaw]
    expected = f"the loaded state of parameter 2: 'row_step' is .*expected .*{message}"
    assert_refused(run, lambda: run.optimizer.load_state_dict(saved), expected)


SHARED: dict[str, Callable[[Run, dict[int, State]], Tensor]] = {
    "the moment of another": lambda run, states: states[0]["exp_avg"],
    "another moment of another": lambda run, states: states[0]["exp_avg_sq"].view(3, 6).view(6, 3),
    "the weights of another": lambda run, states: run.params[0][1].detach(),
    "its own weights": lambda run, states: run.last.detach(),
    "its own weights in another order": lambda run, states: run.last.detach().view(3, 6).t(),
}


@KINDS
@pytest.mark.parametrize("owner", SHARED)
def test_memory_of_others_is_refused(kind: Kind, owner: str) -> None:
    run = Run(kind)
    saved = run.saved()
    saved["state"][2]["exp_avg"] = SHARED[owner](run, saved["state"])
    assert_refused(run, lambda: run.optimizer.load_state_dict(saved), "share memory; expected")


@KINDS
def test_parameters_that_are_loaded_with_one_counter_count_for_themselves(kind: Kind) -> None:
    run = Run(kind)
    saved = run.saved()
    counter = torch.tensor(1.0)
    for state in saved["state"].values():
        state["step"] = counter
    run.optimizer.load_state_dict(saved)
    run.step()
    assert [int(run.optimizer.state[param]["step"]) for _, param in run.params] == [2, 2, 2]


@pytest.mark.parametrize("key", ["step", "exp_avg", "exp_avg_sq", "row_step", "of another version"])
def test_freed_memory_is_refused(key: str) -> None:
    run = Run(SparseAdam)
    saved = run.saved()
    saved["state"][2][key] = torch.zeros(6, 3, dtype=torch.int64)
    saved["state"][2][key].untyped_storage().resize_(0)
    message = f"the loaded state of parameter 2: the storage of '{key}' is too small"
    assert_refused(run, lambda: run.optimizer.load_state_dict(saved), message)

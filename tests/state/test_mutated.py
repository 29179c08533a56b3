"""State dicts and states that something was done to: refused as a whole, or both backends step from them alike.

`make stress` tries 10,000 of each kind for each optimizer.
"""

from __future__ import annotations

import copy
import warnings
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from rowstep import DeferredAdam, DeferredAdamW, SparseAdam
from tests.helpers.deferred_cases import LONG
from tests.helpers.gradients import bits, rows_of, table
from tests.helpers.state_mutations import StateDict, can_be_read, changed, changed_state

COUNT = 10_000 if LONG else 100

ROWS = {0: [1, 4, 1], 2: [0, 2]}
"""For each table, the rows of its gradient. Parameter 1 has a dense one."""

# torch's own words, from before anything is loaded: for groups that do not match, flags and values that are not ours.
TORCHS = ("loaded state dict", "Boolean value of Tensor", "Cannot copy out of meta tensor", "item() cannot be called")
OURS = ("expected", "be deferred", "deferred steps need", "1-element")

Kind = type[SparseAdam | DeferredAdam]


class Run:
    """An optimizer of two tables and a dense parameter, in two groups, after some steps; the same for every backend."""

    def __init__(self, kind: Kind, backend: str, steps: int = 2) -> None:
        torch.manual_seed(0)
        self.backend = backend
        self.params = [table(6, 3), table(4, 3), table(5, 2)]
        second: dict[str, Any] = {"params": self.params[2:], "amsgrad": True}
        if kind is SparseAdam:
            second["bias_correction"] = "row"
        self.optimizer: Any = kind([{"params": self.params[:2]}, second], lr=0.01)
        for _ in range(steps):
            self.step()

    def step(self) -> str:
        """Take a step. If it is refused, that is said with a parameter's name, and nothing has changed."""
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("ROWSTEP_BACKEND", self.backend)
            self._give_gradients()
            before, refusal = self._everything(), ""
            try:
                self.optimizer.step()
            except (TypeError, ValueError) as error:
                refusal = str(error)
            if refusal:
                assert self._everything() == before
                assert "expected" in refusal
                assert "parameter " in refusal or "in group" in refusal
            elif isinstance(self.optimizer, DeferredAdam):
                self.optimizer.flush()
        return refusal

    def load(self, saved: StateDict) -> str:
        """Load this. If it is refused, that is said in words, and nothing has changed."""
        before, refusal = self._everything(), ""
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Casting complex values")  # torch's, of values that are not ours
                self.optimizer.load_state_dict(saved)
        except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            refusal = str(error)
        if refusal:
            assert self._everything() == before
            assert any(words in refusal for words in (*OURS, *TORCHS)), refusal
        return refusal

    def _give_gradients(self) -> None:
        for number, param in enumerate(self.params):
            if number not in ROWS:
                param.grad = torch.ones_like(param)
            else:
                if isinstance(self.optimizer, DeferredAdam):
                    self.optimizer.catch_up(param, torch.tensor(ROWS[number]))
                param.grad = rows_of(param, ROWS[number], 0.5)

    def _everything(self) -> list[Any]:
        """All that could change, options included; a state may hold anything."""
        found: list[Any] = [groups_of(self.optimizer), list(self.optimizer.state)]
        for param in self.params:
            found += [bits(param).tolist(), param._version]
            for key, value in self.optimizer.state.get(param, {}).items():
                found += [key, id(value), content(value)]
        return found


def groups_of(optimizer: Optimizer) -> list[str]:
    return [repr({**group, "params": len(group["params"])}) for group in optimizer.param_groups]


def content(value: object) -> object:
    """What can be compared of a value: of tensors with memory the bytes."""
    if not isinstance(value, Tensor):
        return repr(value)
    return value.contiguous().reshape(-1).view(torch.uint8).tolist() if can_be_read(value) else "no numbers"


def both(kind: Kind) -> list[Run]:
    return [Run(kind, backend) for backend in ("reference", "numba")]


def step_alike(runs: list[Run]) -> bool:
    """Whether both take the step, and then to the same weights; both must say the same of it."""
    said = [run.step() for run in runs]
    assert bool(said[0]) == bool(said[1]), said
    for one, other in zip(*(run.params for run in runs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, equal_nan=True)
    return not said[0]


KINDS = pytest.mark.parametrize("kind", [SparseAdam, DeferredAdam, DeferredAdamW])


@KINDS
def test_state_dicts_are_refused_or_step_as_they_should(kind: Kind) -> None:
    saved, refused, runs = Run(kind, "reference", 3).optimizer.state_dict(), 0, both(kind)
    for number in range(COUNT):
        said = []
        for run in runs:
            mutated = copy.deepcopy(saved)
            changed(mutated, run.params, Random(number))
            said.append(run.load(mutated))
        assert bool(said[0]) == bool(said[1]), said
        if said[0]:
            refused += 1
        else:
            step_alike(runs)
            runs = both(kind)
    assert COUNT / 2 < refused < COUNT


@KINDS
def test_states_changed_by_hand_are_refused_or_step_as_they_should(kind: Kind) -> None:
    refused = 0
    for number in range(COUNT):
        runs = both(kind)
        for run in runs:
            random, states = Random(number), [run.optimizer.state[param] for param in run.params]
            changed_state(random.choice(states), states, run.params, random)
        refused += not step_alike(runs)
    assert COUNT / 2 < refused < COUNT

"""State dicts and states that something was done to: refused as a whole, or both backends step from them alike.

`make stress` tries 2,000 of each kind for each optimizer.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from rowstep import DeferredAdam, DeferredAdamW, SparseAdam
from rowstep._memory import has_memory
from tests.helpers.deferred_cases import LONG
from tests.helpers.gradients import bits, rows_of, table

COUNT = 2_000 if LONG else 50

ROWS = {0: [1, 4, 1], 2: [0, 2]}
"""For each table, the rows of its gradient. Parameter 1 has a dense one."""

# torch's own words, from before anything is loaded: for groups that do not match, flags and values that are not ours.
TORCHS = ("loaded state dict", "Boolean value of Tensor", "Cannot copy out of meta tensor", "item() cannot be called")
OURS = ("expected", "be deferred", "deferred steps need", "1-element")

Kind = type[SparseAdam | DeferredAdam]


StateDict = dict[str, Any]


def can_be_read(value: object) -> bool:
    """Whether this is a tensor with numbers in it."""
    return isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta and has_memory(value)


STRANGE: tuple[Any, ...] = (
    None, True, False, "adam", "", b"1", 0, 1, 2.5, -1, -0.0, math.nan, math.inf, -math.inf, 1e300, 10**400, 1j,
    [], [0.5], (0.9, 0.99), {}, {"a": 1}, torch.tensor([]), torch.tensor(math.nan), torch.tensor(True),
    torch.tensor([0.5, 0.9]), torch.tensor(1j), torch.empty((), device="meta"), torch.ones(2, 2).to_sparse(),
)  # fmt: skip

COUNTS: tuple[Any, ...] = (
    0, 1, 7, 7.0, -1, -1.0, 2.5, math.nan, math.inf, None, True, "3", 2**24, 2**31 - 1, 2**53 - 1, 2**53, 2**60,
    10**400, torch.tensor(3), torch.tensor(3.0), torch.tensor([3.0]), torch.tensor(-1.0), torch.tensor(math.nan),
    torch.tensor(math.inf), torch.tensor(3, dtype=torch.uint8), torch.tensor(True), torch.tensor(2.5),
    torch.tensor(3.0, dtype=torch.float16), torch.tensor(2.0**24), torch.tensor(2**60), torch.tensor([1.0, 2.0]),
    torch.tensor([]), torch.tensor(3 + 0j), torch.empty((), device="meta"), torch.tensor(3.0).to_sparse(),
)  # fmt: skip

LIKELY: dict[str, tuple[Any, ...]] = {
    "lr": (0.0, 0.5, 1, torch.tensor(0.01), torch.tensor([0.01]), -1.0, torch.tensor([0.1, 0.2])),
    "betas": ((0.8, 0.9), [0.8, 0.9], (0.0, 0.0), (0.9, 1.0), (1, 0), (0.9,), "00", {0.8: 0, 0.9: 0}, (None, 0.9)),
    "eps": (1e-3, 1, 0.0, -1e-8),
    "weight_decay": (0.0, 0.1, 1, -0.1, torch.tensor(0.1)),
    "decoupled_weight_decay": (True, False, 1),
    "params": ([0], [0, 0], [0, 1], [1, 0], [2], [9, 8], [], None, 3, "01", [[0], [1]], [None, None], [0.5, math.nan]),
}


DTYPES = (
    torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.uint8, torch.bool, torch.complex64, torch.float32,
)  # fmt: skip

TENSORS: dict[str, Callable[[Tensor, Random], Any]] = {
    "cut": lambda tensor, random: tensor[: random.randrange(max(1, len(tensor)))],
    "flat": lambda tensor, random: tensor.reshape(-1),
    "of more dimensions": lambda tensor, random: tensor.unsqueeze(0),
    "twice as long": lambda tensor, random: torch.cat([tensor, tensor]),
    "of another dtype": lambda tensor, random: tensor.to(random.choice(DTYPES)),
    "of 8 bits": lambda tensor, random: tensor.to(torch.float32).to(torch.float8_e4m3fn),
    "transposed": lambda tensor, random: tensor.t().contiguous().t(),  # the same numbers: nothing is wrong with that
    "expanded": lambda tensor, random: tensor[:1].expand(tensor.shape),
    "overlapping": lambda tensor, random: (
        torch.ones(1 + sum(tensor.shape)).to(tensor.dtype).as_strided(tensor.shape, [1] * tensor.dim())
    ),
    "sparse": lambda tensor, random: tensor.to_sparse(),
    "on meta": lambda tensor, random: tensor.to("meta"),
    "a strange number": lambda tensor, random: with_one_of(tensor.clone(), (-1, 0, 1, 100), random),
    "not finite": lambda tensor, random: with_one_of(
        tensor.to(torch.float32, copy=True), (math.nan, math.inf, -math.inf), random
    ),
    "freed": lambda tensor, random: freed(tensor.clone()),
    "a list": lambda tensor, random: tensor.tolist(),
    "an array": lambda tensor, random: tensor.numpy(),
}


def one_of(values: Sequence[Any], random: Random) -> Any:
    """A copy of one of these: a state keeps the tensor that it is given as its count, and steps count in it."""
    return copy.deepcopy(random.choice(values))


def with_one_of(tensor: Tensor, numbers: Sequence[float], random: Random) -> Tensor:
    if tensor.numel():
        tensor.view(-1)[random.randrange(tensor.numel())] = random.choice(numbers)
    return tensor


def freed(tensor: Tensor) -> Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


def changed_state(
    state: dict[Any, Any], others: list[dict[Any, Any]], params: Sequence[Tensor], random: Random
) -> None:
    """Change one thing of one parameter's state."""
    key = random.choice([*state, "step", "row_step"])
    value = state.get(key)
    match random.randrange(8):
        case 0:
            state.pop(key, None)
        case 1:
            key = random.choice(("exp_avg", "max_exp_avg_sq", "row_step", "rowstep_row_order", "moment", 3, None))
            state[key] = one_of(STRANGE, random)
        case 2:
            other = random.choice(others)
            found = other[random.choice(list(other))] if other else None
            state[key] = found.clone() if isinstance(found, Tensor) and not found.dim() else found
        case 3:
            state[random.choice(("exp_avg", "exp_avg_sq"))] = random.choice(params).detach()
        case 4:
            state["step"] = one_of(COUNTS, random)
        case _:
            if isinstance(value, Tensor) and value.dim() and can_be_read(value):
                state[key] = random.choice(list(TENSORS.values()))(value, random)
            else:
                state[key] = one_of(STRANGE, random)


def changed_group(group: dict[Any, Any], random: Random) -> None:
    """Change one thing of one group."""
    key = random.choice(list(group))
    match random.randrange(6):
        case 0:
            del group[key]
        case 1:
            unknown = random.choice(("foreach", "fused", "capturable", "momentum", "param_names", 3))
            group[unknown] = one_of(STRANGE, random)
        case 2:
            key = random.choice(list(LIKELY))
            group[key] = one_of(LIKELY[key], random)
        case 3:
            key = random.choice(list(LIKELY))
            group[key] = one_of(STRANGE, random)
        case _:
            group[key] = one_of(STRANGE, random)


def changed_structure(saved: StateDict, random: Random) -> None:
    """Change how the state dict is built."""
    states, groups = saved["state"], saved["param_groups"]
    number = random.choice(list(states))
    match random.randrange(9):
        case 0:
            del states[number]
        case 1:
            states[number] = one_of(STRANGE, random)
        case 2:
            states[random.choice((7, "0", "1", None, -1, 0.5, (0,)))] = states.pop(number)
        case 3:
            numbers = list(states)
            random.shuffle(numbers)
            saved["state"] = dict(zip(numbers, states.values(), strict=True))
        case 4:
            groups.pop(random.randrange(len(groups)))
        case 5:
            groups.append(dict(random.choice(groups)))
        case 6:
            groups.reverse()
        case 7:
            groups[random.randrange(len(groups))] = one_of(STRANGE, random)
        case 8:
            key = random.choice(list(saved))
            saved[key] = one_of(STRANGE, random)


def changed(saved: StateDict, params: Sequence[Tensor], random: Random) -> None:
    """Change something of a state dict, most often one thing."""
    for _ in range(random.choice((1, 1, 1, 2))):
        states, groups = saved.get("state"), saved.get("param_groups")
        if not isinstance(states, dict) or not isinstance(groups, list) or not states or not groups:
            return
        owned = [state for state in states.values() if isinstance(state, dict)]
        listed = [group for group in groups if isinstance(group, dict) and group]
        match random.randrange(6):
            case 0:
                changed_structure(saved, random)
            case 1 | 2 if listed:
                changed_group(random.choice(listed), random)
            case _ if owned:
                changed_state(random.choice(owned), owned, params, random)


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

"""A run that Hypothesis makes up: the same tables on both backends and in a model.

After every rule the options, the weights, the moments and the counts of both backends are held against the model's.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant
from torch import Tensor, nn

from tests.helpers.adam_models import Slot, TableModel
from tests.helpers.deferred_cases import LONG
from tests.helpers.random_gradients import Dice, Gradient, Sketch, all_dice
from tests.helpers.rounding import quiet

# 60 histories, or 1,000. Hypothesis varies what it has tried already, so that many seeds see more than many examples.
SEEDS = range(20 if LONG else 6)
# A short run stops at the first failure: to find the smallest takes minutes.
LENGTH = settings(
    max_examples=50 if LONG else 10,
    stateful_step_count=40 if LONG else 20,
    phases=list(Phase) if LONG else [Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)

# A kernel takes a second or two to compile for each combination of optional terms and dtypes. A short run makes do with
# these dtypes, of the table and of its moments: for every set of options, for two of them, and for one.
F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
FOR_ALL = {(F64, F64)}
FOR_TWO = FOR_ALL | {(F32, F32)}
FOR_PLAIN = FOR_TWO | {(F32, F64), (BF16, BF16)}

BACKENDS = ("reference", "numba")
SHAPES = [(6, 3), (6, 3), (6, 3), (4, 1), (4, 1), (1, 2), (5,), (3, 2, 2), (0, 3)]

seeds = st.integers(0, 999)


def random_weights(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


class OtherTable(nn.Module):
    """A parameter that no embedding reads."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)


def table_module(weight: Tensor) -> nn.Module:
    if weight.dim() == 2 and weight.is_contiguous():
        return nn.Embedding(weight.shape[0], weight.shape[1], sparse=True, _weight=weight)
    return OtherTable(weight)


class Side:
    """The tables on one backend."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.module: Any = nn.ModuleList()
        self.optimizer: Any = None

    def param(self, index: int) -> Any:
        return self.module[index].weight

    def give(self, gradients: dict[int, Gradient]) -> None:
        """Put these gradients into their parameters, and none into the others."""
        for index, module in enumerate(self.module):
            param = module.weight
            param.grad = None
            if index in gradients:
                param.grad_dtype = gradients[index].dtype
                param.grad = gradients[index].tensor(tuple(param.shape))

    def assert_gradients_are(self, gradients: dict[int, Gradient]) -> None:
        """A step changes no gradient."""
        for index, gradient in gradients.items():
            found, given = self.param(index).grad, gradient.tensor(tuple(self.param(index).shape))
            if gradient.is_sparse:
                assert found.is_coalesced() == given.is_coalesced()
                assert torch.equal(found._indices(), given._indices())
                found, given = found._values(), given._values()
            assert bits(found) == bits(given)


class Machine(RuleBasedStateMachine):
    """What SparseAdam's and DeferredAdam's runs have in common. Each table is a group of its own."""

    model_class: type[TableModel]
    defaults: ClassVar[dict[str, Any]]
    option_sets: ClassVar[dict[str, dict[str, Any]]]
    betas: ClassVar[list[tuple[float, float]]]

    def __init__(self) -> None:
        super().__init__()
        self.sides = [Side(backend) for backend in BACKENDS]
        self.models: list[Any] = []
        self.names: list[str] = []
        """Which of ``option_sets`` each table has."""

    # What subclasses say

    @abstractmethod
    def make_optimizer(self, side: Side, groups: list[dict[str, Any]]) -> Any:
        """An optimizer of these groups, whose parameters are the side's tables."""

    @abstractmethod
    def can_compile(self, options: str, dtype: torch.dtype, state_dtype: torch.dtype) -> bool:
        """Whether a kernel for this is among those that a short run may compile."""

    def can_all_compile(self, dtypes: Callable[[Any], tuple[torch.dtype, torch.dtype]]) -> bool:
        pairs = zip(self.names, self.models, strict=True)
        return all(self.can_compile(name, *dtypes(model)) for name, model in pairs)

    @abstractmethod
    def number_or_class(self, value: Any) -> Any:
        """What two numbers that are not finite must have in common."""

    def compared_rows(self, model: Any) -> Any:
        return np.ones(model.shape[:1], dtype=bool)

    def least(self, key: str, model: Any) -> Any:
        """Below which numbers of this slot are all the same."""
        return -np.inf

    # Doing things

    def each(self, action: Callable[[Side], object]) -> None:
        """Do this on both backends."""
        for side in self.sides:
            with pytest.MonkeyPatch.context() as environment:
                environment.setenv("ROWSTEP_BACKEND", side.backend)
                action(side)

    def each_refuses(
        self, error: type[Exception] | tuple[type[Exception], ...], action: Callable[[Side], object]
    ) -> None:
        """Both backends raise, and change nothing."""

        def attempt(side: Side) -> None:
            before = everything(side)
            with pytest.raises(error):
                action(side)
            after = everything(side)
            assert after == before, [key for key in before.keys() | after.keys() if before.get(key) != after.get(key)]

        self.each(attempt)

    def index(self, number: int) -> int:
        return number % len(self.models)

    def group(self, index: int) -> dict[str, Any]:
        """A group as the constructor takes it; the parameter is the caller's to add."""
        return dict(self.models[index].options)

    def draw_table(self, dice: Dice) -> None:
        """Add a table to both sides and to the models."""
        name = dice.choice([*self.option_sets, "plain", "plain"])
        dtype = dice.choice([dtype for dtype in (F64, F64, F32, BF16) if self.can_compile(name, dtype, dtype)])
        weight = random_weights(dice.choice(SHAPES), dice.below(1000), dtype)
        if dice.below(5) == 0 and weight.dim() == 2:
            weight = weight.t().contiguous().t()
        for side in self.sides:
            side.module.append(table_module(weight.clone(memory_format=torch.preserve_format)))
        numbers = {key: dice.choice(values) for key, values in self.numbers().items()}
        self.models.append(self.model_class(weight, numbers | self.defaults | self.option_sets[name]))
        self.names.append(name)
        note(f"table {len(self.models) - 1}: {tuple(weight.shape)}, {weight.dtype}, {self.models[-1].options}")

    def numbers(self) -> dict[str, list[Any]]:
        """What the options may be that are numbers and cost no kernel of their own."""
        return {"lr": [0.1, 1e-3, torch.tensor(0.01, dtype=F64), 0.0], "eps": [1e-3, 1e-8], "betas": self.betas}

    @initialize(dice=all_dice)
    def begin(self, dice: Dice) -> None:
        self.draw_table(dice)
        self.each(self.renew)

    def renew(self, side: Side) -> None:
        """An optimizer without a history over the tables as they are."""
        groups = [{"params": [side.param(i)], **self.group(i)} for i in range(len(self.models))]
        side.optimizer = self.make_optimizer(side, groups)

    def gradient(self, index: int, sketch: Sketch, dtype: torch.dtype | None = None) -> Gradient:
        model = self.models[index]
        note(f"table {index} of {model.dtype}: {sketch}")
        by_rows = model.options.get("bias_correction") == "row"
        return sketch.for_table(model.shape, dtype or model.dtype, by_rows=by_rows)

    # Comparing

    @invariant()
    def both_backends_are_the_models(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():  # as they lie in memory: a read would bring rows up to date
            self._compare()

    def _compare(self) -> None:
        for index, model in enumerate(self.models):
            states = [side.optimizer.state.get(side.param(index), {}) for side in self.sides]
            for side, state in zip(self.sides, states, strict=True):
                self.assert_counts(model, state)
                assert state.keys() - {"step", "row_step"} == model.slots.keys() - {"p"}, side.backend
                group = side.optimizer.param_groups[index]
                assert {key: group[key] for key in model.options} == model.options, side.backend
            for key, slot in model.slots.items():
                tensors = [
                    side.param(index).detach() if key == "p" else state[key]
                    for side, state in zip(self.sides, states, strict=True)
                ]
                assert {tensor.dtype for tensor in tensors} == {slot.dtype}, key
                assert {tuple(tensor.shape) for tensor in tensors} == {model.shape}, key
                self.assert_numbers(key, slot, [tensor.double().numpy() for tensor in tensors], model)

    def assert_counts(self, model: Any, state: dict[str, Any]) -> None:
        assert int(state.get("step", 0)) == model.steps
        counts = state.get("row_step")
        assert (counts is None) == (model.row_steps is None)
        if counts is not None:
            assert counts.dtype == torch.int64
            assert counts.tolist() == model.row_steps.tolist()

    @quiet
    def assert_numbers(self, key: str, slot: Slot, found: list[Any], model: Any) -> None:
        rows = self.compared_rows(model)
        least = np.broadcast_to(self.least(key, model), model.shape)[rows]
        value, error = np.maximum(slot.value[rows], least), slot.error[rows]
        known = np.isfinite(error)
        for backend, numbers in zip(BACKENDS, found, strict=True):
            numbers = np.maximum(numbers[rows], least)
            near = np.abs(numbers - value) <= error
            alike = np.isfinite(value) == np.isfinite(numbers)
            alike &= np.isfinite(value) | (self.number_or_class(value) == self.number_or_class(numbers))
            right = ~known | (alike & (near | ~np.isfinite(value)))
            assert right.all(), f"{key} on {backend}: {numbers}\nexpected {value}\nwithin {error}"
        if {slot.dtype for slot in model.slots.values()} != {torch.float64}:
            reference, compiled = found
            spread = np.nan_to_num(np.abs(reference - compiled), nan=0.0, posinf=np.inf)
            slot.adopt(rows, reference, spread)


def everything(side: Side) -> dict[str, Any]:
    """All that an optimizer can change; of tensors the bits, so that NaN is equal to itself."""
    found: dict[str, Any] = {"skipped": getattr(side.optimizer, "skipped_rows", 0)}
    for index, group in enumerate(side.optimizer.param_groups):
        found |= {f"{index}: {key}": value for key, value in group.items() if key != "params"}
        (param,) = group["params"]
        with torch._C.DisableTorchFunctionSubclass():
            tensors = {"p": param.detach()} | side.optimizer.state.get(param, {})
            found |= {f"{index}: {key}": bits(value) for key, value in tensors.items()}
    return found


def bits(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    numbers = torch.empty(value.numel(), dtype=value.dtype).copy_(value.reshape(-1))
    return value.dtype, tuple(value.shape), numbers.view(torch.uint8).numpy().tobytes()

"""Histories that Hypothesis makes up: whatever is done to SparseAdam's tables, both backends stay with the model."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import seed
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule, run_state_machine_as_test

from rowstep import SparseAdam
from tests.helpers.adam_models import SparseModel
from tests.helpers.deferred_cases import LONG
from tests.helpers.machine import BF16, F32, F64, FOR_ALL, FOR_PLAIN, FOR_TWO, LENGTH, SEEDS, Side
from tests.helpers.machine_rules import Program, which
from tests.helpers.random_gradients import DENSE, SPARSE, Gradient, Sketch, sketches

DTYPES = {"plain": FOR_PLAIN, "AdamW, amsgrad": FOR_TWO}


class SparseAdamRun(Program):
    """SparseAdam, and torch's SparseAdam and Adam, between which its checkpoints pass."""

    model_class = SparseModel
    betas: ClassVar[list[tuple[float, float]]] = [(0.9, 0.999), (0.5, 0.6), (0.0, 0.9), (0.9, 0.0)]
    option_sets: ClassVar[dict[str, dict[str, Any]]] = {
        "plain": {},
        "AdamW, amsgrad": {"weight_decay": 0.1, "decoupled_weight_decay": True, "amsgrad": True},
        "L2": {"weight_decay": 0.1},
        "force_sparse": {"force_sparse": True},
        "row": {"bias_correction": "row"},
        "row, skip, L2, amsgrad, maximize": {
            "bias_correction": "row", "nonfinite": "skip", "weight_decay": 0.01, "amsgrad": True, "maximize": True,
        },
    }  # fmt: skip
    defaults: ClassVar[dict[str, Any]] = {
        "decoupled_weight_decay": False, "force_sparse": False, "bias_correction": "global", "nonfinite": "propagate",
        "maximize": False, "weight_decay": 0.0, "amsgrad": False,
    }  # fmt: skip

    def can_compile(self, options: str, dtype: torch.dtype, state_dtype: torch.dtype) -> bool:
        return LONG or (dtype, state_dtype) in DTYPES.get(options, FOR_ALL)

    def make_optimizer(self, side: Side, groups: list[dict[str, Any]]) -> Any:
        return SparseAdam(groups)

    def number_or_class(self, value: Any) -> Any:
        return np.nan_to_num(np.sign(value), nan=2.0)

    def loaded(self, renewed: bool) -> None:
        super().loaded(renewed)
        if renewed:
            for model in self.models:
                model.skipped = 0

    @invariant()
    def skipped_rows_are_counted(self) -> None:
        for side in self.sides:
            assert side.optimizer is None or side.optimizer.skipped_rows == sum(model.skipped for model in self.models)

    # Stepping

    def take(self, gradients: dict[int, Gradient]) -> None:
        """A step with these gradients, or the error that it must raise."""
        refusals = [error for i, g in sorted(gradients.items()) if (error := self.models[i].refusal(g))]
        self.each(lambda side: side.give(gradients))
        if refusals:
            self.each_refuses(refusals[0], lambda side: side.optimizer.step())
        else:
            for index, gradient in gradients.items():
                self.models[index].step(gradient)
            self.each(lambda side: side.optimizer.step())
        self.each(lambda side: side.assert_gradients_are(gradients))

    @rule(number=which, history=st.lists(sketches(), min_size=1, max_size=6))
    def step(self, number: int, history: list[Sketch]) -> None:
        index = self.index(number)
        for sketch in history:
            self.take({index: self.gradient(index, sketch)})
            self.both_backends_are_the_models()

    # A rule is drawn as often as it has names.
    step_2 = step_3 = step_4 = step_5 = step_6 = step_7 = step_8 = step

    @rule(number=which, sketch=sketches())
    def step_with_float32(self, number: int, sketch: Sketch) -> None:
        index = self.index(number)
        model = self.models[index]
        if LONG or (self.names[index] == "plain" and model.state_dtype == F64):
            self.take({index: self.gradient(index, sketch, F32)})

    @rule(sketches=st.lists(sketches(), min_size=2, max_size=2))
    def step_all(self, sketches: list[Sketch]) -> None:
        self.take({index: self.gradient(index, sketches[index]) for index in range(len(self.models))})

    # Torch's classes

    @precondition(Program.can_load)
    @rule(sketch=sketches(SPARSE), takes_a_step=st.booleans())
    def reload_through_torchs_sparse_adam(self, sketch: Sketch, takes_a_step: bool) -> None:
        # With a Tensor for a count, which a dense step leaves, torch's SparseAdam corrects its bias in float32.
        count = self.sides[0].optimizer.state.get(self.sides[0].param(0), {}).get("step", 0)
        self.reload_through(torch.optim.SparseAdam, sketch, takes_a_step and not isinstance(count, torch.Tensor))

    @precondition(Program.can_load)
    @rule(sketch=sketches(DENSE), takes_a_step=st.booleans())
    def reload_through_torchs_adam(self, sketch: Sketch, takes_a_step: bool) -> None:
        self.reload_through(torch.optim.Adam, sketch, takes_a_step and not self.models[0].lacks_maximum)

    def reload_through(self, torchs: Any, sketch: Sketch, takes_a_step: bool) -> None:
        """Go on in torch's class, perhaps for a step of the first table, and come back."""
        gradients = {0: self.gradient(0, sketch)} if takes_a_step and self.models[0].dtype != BF16 else {}
        self.loaded(renewed=True)
        for index, gradient in gradients.items():
            self.models[index].step(gradient, torchs=True)
        self.each(lambda side: self.visit(torchs, side, gradients))


@pytest.mark.parametrize("number", SEEDS)
def test_any_history_is_the_models(number: int) -> None:
    run_state_machine_as_test(seed(number)(SparseAdamRun), settings=LENGTH)

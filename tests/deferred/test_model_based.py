"""Histories that Hypothesis makes up: whatever is done to DeferredAdam's tables, they are dense Adam's when read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import seed
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule, run_state_machine_as_test
from torch import Tensor

from rowstep import DeferredAdam, DeferredAdamW, StaleRowsError
from tests.helpers.adam_models import TableModel
from tests.helpers.deferred_cases import LONG
from tests.helpers.machine import BF16, FOR_ALL, FOR_PLAIN, LENGTH, SEEDS, Side
from tests.helpers.machine_rules import Program, row_lists, which
from tests.helpers.random_gradients import DENSE, SIZES, Gradient, Sketch, sketches
from tests.helpers.rounding import Rough, precision_of, widest


class DenseModel(TableModel):
    """Adam's and AdamW's, whose rows DeferredAdam lets wait. ``current`` are the rows that do not."""

    def __init__(self, weights: Tensor, options: dict[str, Any]) -> None:
        super().__init__(weights, options)
        self.current = np.ones(self.shape[:1], dtype=bool)
        self.waits = False
        self.settled = self._path_options()

    def _path_options(self) -> tuple[Any, ...]:
        return self.options["betas"], self.options["eps"], self.options["amsgrad"]

    def step(self, gradient: Gradient) -> None:
        self.settle()
        self.begin()
        self.steps += 1
        lead = self.shape[:1]
        if not gradient.is_sparse:
            self.flush()
            rows, g = gradient.all_rows(lead, self.dtype)
            g.precision = precision_of(self.dtype)
            self.move(lead, rows, g, self.steps, as_dense=True, torchs=True)
            return
        if not self.waits and self.options["amsgrad"]:
            self._raise_maximum(lead)
        self.waits = True
        dtype = widest(self.dtype, self.state_dtype, gradient.dtype)
        rows, g = gradient.rows_of_first_dimension(self.shape, dtype)
        others = np.setdiff1d(np.arange(lead[0]), rows)
        nothing = np.zeros((len(others), g.value.shape[1]))
        rest = precision_of(widest(self.dtype, self.state_dtype))
        self.move(lead, others, Rough(nothing, nothing, rest), self.steps, as_dense=True, stored=False)
        self.move(lead, rows, g, self.steps, as_dense=True)
        self.current[:] = False
        self.current[rows] = True

    def _raise_maximum(self, lead: tuple[int, ...]) -> None:
        """When rows begin to wait, amsgrad's maximum is made what the next step would make it, in its own dtype."""
        rows, precision = np.arange(lead[0]), precision_of(self.state_dtype)
        largest, second = (self.slots[key].rows(lead, rows, precision) for key in ("max_exp_avg_sq", "exp_avg_sq"))
        self.slots["max_exp_avg_sq"].write(lead, rows, largest.maximum(second * self.options["betas"][1]))

    def settle(self) -> None:
        """Changed betas, eps or amsgrad bring every row up to date before the next step."""
        if self.settled != self._path_options():
            self.settled = self._path_options()
            if self.waits:
                self.flush()
                self.waits = False

    def catch_up(self, rows: Any) -> None:
        if self.waits:  # under the options of the last step, whatever they are now
            self._bring(np.isin(np.arange(self.shape[0]), rows))

    def flush(self) -> None:
        self._bring(np.ones(self.shape[:1], dtype=bool))

    def restart(self) -> None:
        """Forget the rows that wait, all of them being up to date: as an optimizer begins."""
        self.flush()
        self.waits, self.settled = False, self._path_options()

    def _bring(self, rows: Any) -> None:
        brought = np.nonzero(rows & ~self.current)[0]
        for slot in self.slots.values():
            slot.write(self.shape[:1], brought, slot.rows(self.shape[:1], brought, precision_of(slot.dtype)))
        self.current[brought] = True

    def stale(self, rows: Any) -> bool:
        return self.waits and not self.current[rows].all()

    def change_rows(self, change: Callable[[Any], Any]) -> None:
        self.flush()
        super().change_rows(change)
        self.current = np.ones(self.shape[:1], dtype=bool)

    def reset(self, rows: list[int]) -> None:
        self.flush()
        super().reset(rows)


FINITE = tuple(size for size in SIZES if size not in ("inf", "-inf", "nan"))


class DeferredAdamRun(Program):
    """DeferredAdam and DeferredAdamW against dense Adam and AdamW: only the rows that do not wait can be compared."""

    model_class = DenseModel
    betas: ClassVar[list[tuple[float, float]]] = [(0.9, 0.999), (0.5, 0.9), (0.0, 0.9), (0.95, 0.95), (0.3, 0.1)]
    defaults: ClassVar[dict[str, Any]] = {
        "decoupled_weight_decay": True,
        "maximize": False,
        "weight_decay": 0.0,
        "amsgrad": False,
    }
    option_sets: ClassVar[dict[str, dict[str, Any]]] = {
        "plain": {},
        "AdamW, amsgrad": {"weight_decay": 0.1, "amsgrad": True},
        "AdamW, maximize": {"weight_decay": 0.01, "maximize": True},
    }

    def can_compile(self, options: str, dtype: torch.dtype, state_dtype: torch.dtype) -> bool:
        return LONG or (dtype, state_dtype) in (FOR_PLAIN if options == "plain" else FOR_ALL)

    def make_optimizer(self, side: Side, groups: list[dict[str, Any]]) -> Any:
        return (DeferredAdamW if groups[0]["weight_decay"] else DeferredAdam)(groups)

    def number_or_class(self, value: Any) -> Any:
        return np.isfinite(value)

    def compared_rows(self, model: Any) -> Any:
        return model.current

    def least(self, key: str, model: Any) -> Any:
        # DeferredAdam raises the maximum ahead of the step that would, when amsgrad is switched on.
        if key != "max_exp_avg_sq":
            return -np.inf
        second = model.slots["exp_avg_sq"]
        return model.options["betas"][1] * (second.value + 2 * second.error) if model.options["amsgrad"] else np.inf

    # Stepping

    def can_be_taken(self, model: DenseModel, gradient: Gradient) -> bool:
        return gradient.is_sparse or model.dtype == model.state_dtype

    def take(self, gradients: dict[int, Gradient], *, allow_stale: bool = False) -> None:
        """A step with these gradients, or the error for rows that were not up to date."""
        if any(not self.can_be_taken(self.models[i], gradient) for i, gradient in gradients.items()):
            return

        def step(side: Side) -> None:
            side.optimizer.allow_stale = allow_stale
            side.optimizer.step()

        self.each(lambda side: side.give(gradients))
        if not allow_stale and any(self.models[i].stale(named_rows(g, self.models[i])) for i, g in gradients.items()):
            self.each_refuses(StaleRowsError, step)
        else:
            for index, gradient in gradients.items():
                self.models[index].catch_up(named_rows(gradient, self.models[index]))
                self.models[index].step(gradient)
            self.each(step)
        self.each(lambda side: side.assert_gradients_are(gradients))

    @rule(number=which, history=st.lists(sketches(("uncoalesced",), FINITE), min_size=1, max_size=4))
    def look_up_and_step(self, number: int, history: list[Sketch]) -> None:
        index = self.index(number)
        if not isinstance(self.sides[0].module[index], torch.nn.Embedding):
            return
        for sketch in history:
            sketch.sparse_dim = 1
            gradient = self.gradient(index, sketch)
            ids = torch.tensor(gradient.ids, dtype=torch.int64)

            def train(side: Side, gradient: Gradient = gradient, ids: torch.Tensor = ids) -> None:
                side.give({})
                side.param(index).grad_dtype = gradient.dtype
                side.module[index](ids).backward(gradient.values)
                side.optimizer.step()

            self.models[index].catch_up(gradient.ids)
            self.models[index].step(gradient)
            self.each(train)
            self.both_backends_are_the_models()

    @rule(number=which, sketch=sketches(), ready=st.sampled_from(["caught up", "flushed", "may be stale", "no"]))
    def step(self, number: int, sketch: Sketch, ready: str) -> None:
        index = self.index(number)
        gradient = self.gradient(index, sketch)
        rows = named_rows(gradient, self.models[index])
        if ready == "caught up":
            self.catch_up(number, rows.tolist())
        elif ready == "flushed":
            self.flush()
        self.take({index: gradient}, allow_stale=ready == "may be stale")

    # A rule is drawn as often as it has names.
    train_2 = train_3 = train_4 = look_up_and_step
    step_2 = step_3 = step_4 = step

    @rule(sketches=st.lists(sketches(sizes=FINITE), min_size=2, max_size=2))
    def step_all(self, sketches: list[Sketch]) -> None:
        self.take({index: self.gradient(index, sketches[index]) for index in range(len(self.models))})

    @rule(number=which, steps=st.sampled_from([1, 2, 7, 7, 65] + [400] * LONG))
    def wait(self, number: int, steps: int) -> None:
        index = self.index(number)
        for _ in range(steps):
            self.take({index: self.gradient(index, Sketch("uncoalesced", 1, [], "ordinary", 0))})

    wait_2 = wait_3 = wait

    # Reading

    @rule(number=which, ids=row_lists)
    def catch_up(self, number: int, ids: list[int]) -> None:
        index = self.index(number)
        count = self.models[index].shape[0]
        rows = [i % count for i in ids] if count else []
        self.models[index].catch_up(rows)
        self.each(lambda side: side.optimizer.catch_up(side.param(index), torch.tensor(rows, dtype=torch.int64)))

    @rule()
    def flush(self) -> None:
        for model in self.models:
            model.flush()
        self.each(lambda side: side.optimizer.flush())

    def settle(self) -> None:
        self.flush()

    @rule()
    def read_all_weights(self) -> None:
        """As evaluation and checkpoints of the model do."""
        for index in range(len(self.models)):
            self.moved(index)
        self.each(lambda side: side.module.state_dict())

    # Copies

    def moved(self, index: int) -> None:
        self.models[index].flush()

    def copied(self) -> None:
        for model in self.models:
            model.restart()

    def loaded(self, renewed: bool) -> None:
        for model in self.models:
            model.restart()
        super().loaded(renewed)

    @precondition(Program.can_load)
    @rule(
        torchs=st.sampled_from([torch.optim.Adam, torch.optim.AdamW]),
        sketch=sketches(DENSE),
        takes_a_step=st.booleans(),
    )
    def reload_through_torchs(self, torchs: Any, sketch: Sketch, takes_a_step: bool) -> None:
        takes_a_step = takes_a_step and self.models[0].dtype != BF16 and not self.models[0].lacks_maximum
        gradients = {0: self.gradient(0, sketch)} if takes_a_step else {}
        self.loaded(renewed=True)
        for index, gradient in gradients.items():
            self.models[index].step(gradient)
        self.each(lambda side: self.visit(torchs, side, gradients))

    def teardown(self) -> None:
        if self.models:
            self.flush()
            self.both_backends_are_the_models()


def named_rows(gradient: Gradient, model: DenseModel) -> Any:
    """The rows along the first dimension that a gradient has something for."""
    if gradient.is_sparse:
        return gradient.rows_of_first_dimension(model.shape, model.dtype)[0]
    return gradient.summed_rows(model.shape, model.dtype)[1]


@pytest.mark.parametrize("number", SEEDS)
def test_any_history_is_dense_adams(number: int) -> None:
    run_state_machine_as_test(seed(number)(DeferredAdamRun), settings=LENGTH)

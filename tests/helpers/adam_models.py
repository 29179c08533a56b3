"""What a table and its state must be after any history: Adam in float64 from its equations, with bounds on rounding.

``SparseModel`` is a table under SparseAdam: rows without a gradient rest. The model of Adam and AdamW, in which every
row moves at every step, is in ``deferred/test_model_based``. Neither has anything in common with the package.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.helpers.random_gradients import Gradient
from tests.helpers.rounding import Array, Precision, Rough, as_rows, precision_of, quiet, widest

MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
FLOAT64 = precision_of(torch.float64)

# What DeferredAdam's coefficients may be off, relative to a row's deferred move.
SERIES = {torch.float64: 1e-14, torch.float32: 1e-8, torch.bfloat16: 1e-8}
# Momentum below this share of eps may be dropped while a row waits.
DUST_OF_EPS = 1e-24


@dataclass
class Slot:
    """The numbers of a parameter or of one of its moments."""

    value: Array
    error: Array
    dtype: torch.dtype

    def rows(self, lead: tuple[int, ...], rows: Any, precision: Precision) -> Rough:
        """These rows, over the first dimensions, as a matrix to compute with."""
        value, error = (as_rows(array, lead)[rows] for array in (self.value, self.error))
        return Rough(value, error, precision)

    @quiet
    def write(self, lead: tuple[int, ...], rows: Any, numbers: Rough, *, stored: bool = True) -> None:
        numbers = numbers.rounded(precision_of(self.dtype)) if stored else numbers
        for array, new in ((self.value, numbers.value), (self.error, numbers.error)):
            as_rows(array, lead)[rows] = new

    @quiet
    def cast(self, dtype: torch.dtype) -> None:
        if dtype != self.dtype:
            rounded = Rough(self.value, self.error, precision_of(dtype)).rounded(precision_of(dtype))
            self.value, self.error, self.dtype = rounded.value, rounded.error.copy(), dtype

    def adopt(self, where: Array, numbers: Array, spread: Array) -> None:
        """Go on from numbers that were found to be right, and how far apart those of two backends were."""
        self.value[where], self.error[where] = numbers[where], spread[where]


class TableModel:
    """One table under one group's options."""

    def __init__(self, weights: Tensor, options: dict[str, Any]) -> None:
        self.options = options
        numbers = weights.detach().double().numpy().copy()
        self.slots = {"p": Slot(numbers, np.zeros_like(numbers), weights.dtype)}
        self.steps = 0
        self.row_steps: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.slots["p"].value.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.slots["p"].dtype

    @property
    def state_dtype(self) -> torch.dtype:
        return self.slots["exp_avg"].dtype if self.has_state else self.dtype

    @property
    def has_state(self) -> bool:
        return "exp_avg" in self.slots

    @property
    def lacks_maximum(self) -> bool:
        """Whether amsgrad was switched on after the state was made: torch's Adam then knows no maximum."""
        return self.options["amsgrad"] and self.has_state and "max_exp_avg_sq" not in self.slots

    def begin(self) -> None:
        """Make the state that a step needs."""
        for key in MOMENTS if self.options["amsgrad"] else MOMENTS[:2]:
            if key not in self.slots:
                zeros = np.zeros_like(self.slots["p"].value)
                self.slots[key] = Slot(zeros, zeros.copy(), self.state_dtype)

    def nonfinite_rows(self, sums: Rough) -> Any:
        return ~np.isfinite(sums.value).all(axis=1)

    def _correction(self, beta: float, count: Any) -> Rough:
        power = beta ** np.asarray(count, dtype=np.float64)
        return Rough(1 - power, FLOAT64.unit * (1 + power), FLOAT64)

    @quiet
    def move(
        self, lead: tuple[int, ...], rows: Any, g: Rough, count: Any, *,
        as_dense: bool, torchs: bool = False, stored: bool = True,
    ) -> None:  # fmt: skip
        """One Adam step of these rows with this gradient; ``count`` is the step, or a column of each row's own.

        ``torchs`` is a step of torch's dense Adam. It comes in several orders of operations, which agree on what is
        finite, but not on whether an infinity in a moment becomes a NaN.
        """
        if not len(rows):
            return
        lr, (beta1, beta2), decay = float(self.options["lr"]), self.options["betas"], self.options["weight_decay"]
        precision = g.precision

        def read(key: str) -> Rough:
            numbers = self.slots[key].rows(lead, rows, precision)
            return numbers.known_if_finite() if torchs and key != "p" else numbers

        p, m, v = (read(key) for key in ("p", "exp_avg", "exp_avg_sq"))
        if self.options["maximize"]:
            g = -g
        if decay and self.options["decoupled_weight_decay"]:
            p = p * (1 - lr * decay)
        elif decay:
            g = g + p * decay
        m = m + (g - m) * (1 - beta1)
        v = v * beta2 + g * g * (1 - beta2) if as_dense else v + (g * g - v) * (1 - beta2)
        moments = {"exp_avg": m, "exp_avg_sq": v}
        if self.options["amsgrad"]:
            v = moments["max_exp_avg_sq"] = v.maximum(read("max_exp_avg_sq"))
        correction2 = self._correction(beta2, count).sqrt()
        step_size = (correction2 * lr / self._correction(beta1, count)).rounded(precision)
        eps = (correction2 * self.options["eps"]).rounded(precision) if as_dense else self.options["eps"]
        move = m / (v.sqrt() + eps) * step_size
        if torchs:
            moments = {key: numbers.known_if_finite() for key, numbers in moments.items()}
        if not stored:
            move, moments["exp_avg"] = (
                move.blurred(0, SERIES[self.state_dtype]),
                m.blurred(DUST_OF_EPS * self.options["eps"]),
            )
        for key, numbers in (moments | {"p": p - move}).items():
            self.slots[key].write(lead, rows, numbers, stored=stored)

    # What is done to tables

    def change_rows(self, change: Callable[[Any], Any]) -> None:
        for slot in self.slots.values():
            slot.value, slot.error = change(slot.value), change(slot.error)
        if self.row_steps is not None and self.row_steps.ndim:
            self.row_steps = change(self.row_steps)

    def grow(self, weights: Tensor) -> None:
        old = self.shape[0]
        self.change_rows(lambda array: np.concatenate([array, np.zeros((len(weights), *array.shape[1:]), array.dtype)]))
        self.slots["p"].value[old:] = weights.double().numpy()

    def keep(self, rows: list[int]) -> None:
        self.change_rows(lambda array: array[rows])

    def reset(self, rows: list[int]) -> None:
        for key, slot in self.slots.items():
            if key != "p":
                slot.value[rows], slot.error[rows] = 0, 0
        if self.row_steps is not None and self.row_steps.ndim:
            self.row_steps[rows] = 0

    def load(self) -> None:
        """A state dict gives moments the parameter's dtype."""
        for slot in self.slots.values():
            slot.cast(self.dtype)


class SparseModel(TableModel):
    """SparseAdam's: a sparse gradient moves the rows it names, a dense one all of them."""

    skipped = 0

    def step(self, gradient: Gradient, *, torchs: bool = False) -> None:
        """One step; ``torchs`` is one that torch.optim.SparseAdam or Adam has taken."""
        options = self.options
        if torchs:
            self.options = options | {"nonfinite": "propagate", "bias_correction": "global", "force_sparse": False}
            if gradient.is_sparse:
                self.options |= {"weight_decay": 0.0, "amsgrad": False}
        self._step(gradient)
        self.options = options

    def _takes_rows(self, gradient: Gradient) -> bool:
        """Whether the step goes by rows. A dense gradient is torch's, where all dtypes are the same."""
        is_torchs = {self.dtype, self.state_dtype, gradient.dtype} == {self.dtype}
        return gradient.is_sparse or self.options["force_sparse"] or not is_torchs

    def _rows_of(self, gradient: Gradient) -> tuple[tuple[int, ...], Any, Rough]:
        dtype = widest(self.dtype, self.state_dtype, gradient.dtype)
        if gradient.is_sparse or self.options["force_sparse"]:
            return gradient.summed_rows(self.shape, dtype)
        return self.shape[:1], *gradient.all_rows(self.shape[:1], dtype)

    def _step(self, gradient: Gradient) -> None:
        self.begin()
        lead, rows, g = self._rows_of(gradient)
        takes_rows, counts = self._takes_rows(gradient), self.options["bias_correction"] == "row"
        if counts and self.row_steps is None:
            seen = (as_rows(self.slots["exp_avg_sq"].value, lead) != 0).any(axis=1).reshape(lead)
            self.row_steps = np.where(seen, self.steps, 0).astype(np.int64)
        self.steps += 1
        if not takes_rows:
            g.precision = precision_of(self.dtype)
            self.move(lead, rows, g, self.steps, as_dense=True, torchs=True)
            if counts:
                self.row_steps += 1
            return
        if self.options["nonfinite"] == "skip":
            bad = self.nonfinite_rows(g)
            self.skipped += int(bad.sum()) if g.value.size else 0
            rows, g = rows[~bad], g.rows(~bad)
        count: Any = self.steps
        if counts:
            self.row_steps.reshape(-1)[rows] += 1
            count = self.row_steps.reshape(-1)[rows][:, None]
        self.move(lead, rows, g, count, as_dense=not (gradient.is_sparse or self.options["force_sparse"]))

    def refusal(self, gradient: Gradient) -> type[Exception] | None:
        """The error that a step with this gradient must raise."""
        if not self._takes_rows(gradient):
            return None
        lead, _, _ = self._rows_of(gradient)
        if self.options["bias_correction"] == "row" and self.row_steps is not None and lead != self.row_steps.shape:
            return ValueError
        return None

"""The table that DeferredAdam has to reach: dense Adam's and AdamW's, with a note of the rows that may wait for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from tests.helpers.adam_models import TableModel
from tests.helpers.random_gradients import Gradient
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

    def settle(self) -> None:
        """Changed betas, eps or amsgrad bring every row up to date before anything else is done to one."""
        if self.settled != self._path_options():
            self.settled = self._path_options()
            if self.waits:
                self.flush()
                self.waits = False

    def catch_up(self, rows: Any) -> None:
        if self.waits:
            self.settle()
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

"""Accelerate: prepared optimizers, accumulation, clipping, saved states."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

import rowstep
from tests.helpers.ratings import Make, Rivals, Taste, ratings


@pytest.fixture(autouse=True)
def _no_accelerator_of_another_test() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class Run:
    """The loop of Accelerate's manual."""

    def __init__(self, model: Taste, make: Make, **options: Any) -> None:
        self.accelerator = Accelerator(cpu=True, **options)
        optimizer = make(model)
        self.model, self.optimizer, self.batches, self.scheduler = self.accelerator.prepare(
            model,
            optimizer,
            DataLoader(TensorDataset(*ratings()), batch_size=16),
            lr_scheduler.ExponentialLR(optimizer, gamma=0.99),
        )

    def epoch(self, clip: float | None = None) -> None:
        for batch in self.batches:
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.model.loss(*batch))
                if clip is not None and self.accelerator.sync_gradients:
                    self.clip(clip)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()

    def clip(self, norm: float) -> None:
        """Accelerate's own where it can: it calls torch's, which refuses sparse gradients."""
        if self.model.users.sparse:
            rowstep.clip_grad_norm_(self.model.parameters(), norm)
        else:
            self.accelerator.clip_grad_norm_(self.model.parameters(), norm)


@pytest.mark.parametrize(("accumulate", "clip"), [(1, 0.5), (3, None)])
def test_a_prepared_run(rivals: Rivals, accumulate: int, clip: float | None) -> None:
    def train(model: Taste, make: Make) -> None:
        run = Run(model, make, gradient_accumulation_steps=accumulate)
        for _ in range(3):
            run.epoch(clip)

    rivals.assert_learn_alike(train)

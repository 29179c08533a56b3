"""Accelerate: prepared optimizers, accumulation, clipping, saved states."""

from __future__ import annotations

from collections.abc import Iterator

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


@pytest.mark.parametrize(("accumulate", "clip"), [(1, 0.5), (3, None)])
def test_a_prepared_run(rivals: Rivals, accumulate: int, clip: float | None) -> None:
    """The loop of Accelerate's manual."""

    def train(model: Taste, make: Make) -> None:
        accelerator, optimizer = Accelerator(cpu=True, gradient_accumulation_steps=accumulate), make(model)
        loader = DataLoader(TensorDataset(*ratings()), batch_size=16)
        scheduler = lr_scheduler.ExponentialLR(optimizer, gamma=0.99)
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        for batch in (batch for _ in range(3) for batch in loader):
            with accelerator.accumulate(model):
                accelerator.backward(model.loss(*batch))
                if clip is not None and accelerator.sync_gradients:
                    # Accelerate's own where it can: it calls torch's, which refuses sparse gradients.
                    (rowstep.clip_grad_norm_ if model.users.sparse else accelerator.clip_grad_norm_)(
                        model.parameters(), clip
                    )
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    rivals.assert_learn_alike(train)

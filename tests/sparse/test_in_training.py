"""Training as people do it with nothing but torch: schedulers, scaled losses, clipping, autocast.

Each run ends better than it began, and as the same run with torch's optimizer. Compiled models have their tests in
deferred/test_wrapped.py, accumulated gradients and averaged weights in deferred/test_programs.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler

import rowstep
from rowstep import DeferredAdam, DeferredAdamW, SparseAdam
from tests.helpers.gradients import Snapshot
from tests.helpers.ratings import RATE, RIVALS, Make, Rivals, Taste, batches


@pytest.fixture(params=RIVALS)
def rivals(request: pytest.FixtureRequest) -> Rivals:
    return RIVALS[request.param]


STEPS = 60

# One that sets the lr, two that cycle the betas too, one that looks at the loss, one that combines others. What else
# there is in torch writes the same numbers to the same places.
SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 10)),
    "CyclicLR": lambda optimizer: lr_scheduler.CyclicLR(optimizer, base_lr=RATE / 4, max_lr=RATE, step_size_up=15),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=2 * RATE, total_steps=STEPS),
    "ReduceLROnPlateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.8, patience=10),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=20), lr_scheduler.CosineAnnealingLR(optimizer, STEPS)],
        milestones=[20],
    ),
}
CYCLE_BETAS = {"CyclicLR", "OneCycleLR"}


@pytest.mark.parametrize(
    ("rivals", "name"),
    [*(("DeferredAdamW", name) for name in SCHEDULERS), ("SparseAdam", "LambdaLR"), ("SparseAdam", "OneCycleLR")],
    indirect=["rivals"],
)
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")  # SequentialLR's own use, in torch 2.8
def test_schedulers(rivals: Rivals, name: str) -> None:
    def train(model: Taste, make: Make) -> None:
        optimizer = make(model)
        scheduler = SCHEDULERS[name](optimizer)
        seen = set()
        for batch in batches(STEPS):
            optimizer.zero_grad()
            loss = model.loss(*batch)
            loss.backward()
            optimizer.step()
            scheduler.step(*([loss.item()] if name == "ReduceLROnPlateau" else []))
            seen.add((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"]))
        assert len({lr for lr, _ in seen}) > 1
        assert (len({betas for _, betas in seen}) > 1) == (name in CYCLE_BETAS)

    rivals.assert_learn_alike(train)


@pytest.mark.parametrize("cls", [SparseAdam, DeferredAdam, DeferredAdamW])
def test_an_optimizer_can_be_made_again_from_its_group(cls: Any) -> None:
    """As PyKEEN does it. torch's Adam can, its AdamW cannot."""
    model = Taste()
    optimizer = cls(model.parameters(), lr=RATE)
    (group,) = optimizer.param_groups
    again = cls(**group)
    assert again.param_groups == optimizer.param_groups


def clip(model: nn.Module, norm: float) -> None:
    """torch's own clipping where it can: for dense gradients."""
    sparse = any(param.grad is not None and param.grad.is_sparse for param in model.parameters())
    (rowstep.clip_grad_norm_ if sparse else nn.utils.clip_grad_norm_)(model.parameters(), norm)


def test_a_scaler_that_unscales_and_skips_and_clipping(rivals: Rivals) -> None:
    def train(model: Taste, make: Make) -> None:
        optimizer = make(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for number, batch in enumerate(batches(STEPS)):
            optimizer.zero_grad()
            loss = model.loss(*batch) * (torch.inf if number in (0, 30) else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            if number not in (0, 30):
                clip(model, 0.5)
            before = Snapshot(optimizer)
            scaler.step(optimizer)
            if number in (0, 30):
                before.assert_unchanged()
            scaler.update()
        assert scaler.get_scale() == 256.0

    rivals.assert_learn_alike(train)


def test_autocast(rivals: Rivals) -> None:
    """Half of the computation in bfloat16: too coarse for the same weights, but both learn."""

    def train(model: Taste, make: Make) -> None:
        optimizer = make(model)
        for batch in batches(STEPS, torch.float32):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model.loss(*batch)
            loss.backward()
            optimizer.step()

    rivals.assert_learn_alike(train, dtype=torch.float32, tolerance=None)

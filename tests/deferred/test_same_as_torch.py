"""DeferredAdam is torch.optim.Adam: every read and the flushed table, over schedules, gradient scales and options.

In float64 the two agree to 1e-13. The bar is for 3,000 steps and all combinations, which ``ROWSTEP_LONG=1`` runs;
without it every value of every option is run, for long enough that rows wait beyond the window.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from rowstep._schedule import Path
from tests.helpers.deferred_cases import LONG, RATE, SCHEDULES, Twins, embedding, only_long, reading, zipf
from tests.helpers.gradients import rows_of

# Each names what it changes: of the optimizer's options, or of how the run is driven.
VARIANTS: list[dict[str, Any]] = [
    {},
    {"schedule": "cosine", "scale": 1e-6},
    {"schedule": "warm-up", "scale": 1e-9},
    {"schedule": "restart", "eps": 1e-6, "scale": 1e-6},
    {"schedule": "on/off", "eps": 1e-3, "scale": 1e-3},
    {"weight_decay": 1.0},
    {"weight_decay": 1.0, "schedule": "on/off", "scale": 1e-9},
    {"weight_decay": 0.01, "schedule": "restart", "betas": (0.5, 0.99)},
    {"amsgrad": True, "weight_decay": 1.0, "scale": 1e-6, "schedule": "cosine"},
    {"amsgrad": True, "maximize": True},
    {"betas": (0.9, 0.95), "eps": 1e-3, "scale": 1e-9, "schedule": "warm-up"},
    {"betas": (0.5, 0.99), "eps": 1e-3, "scale": 1e-6},
    {"betas": (0.0, 0.99), "scale": 1e-6},
]


def run(
    steps: int | None, rows: int, count: int, *, scale: float = 1.0, schedule: str = "constant", **options: Any
) -> None:
    """Steps with Zipf ids, and with four rows that get a gradient early and are not read again before the last step.

    Without a number of steps: just as many that those four rows have waited longer than their momentum acts.
    """
    twins = Twins(embedding(rows), lr=RATE, **options)
    # Under `maximize` the loss turns its sign too, so that the weights stay where they can be compared.
    sign = -1 if options.get("maximize") else 1
    beta1, beta2 = twins.ours.param_groups[0]["betas"]
    ratio = beta1 if options.get("amsgrad") else beta1 / math.sqrt(beta2)
    window = math.ceil(math.log(1e-17) / math.log(ratio)) if ratio else 1
    for t in range(steps or 40 + window):
        twins.set(lr=SCHEDULES[schedule](t))
        ids = zipf(rows - 4, count)
        if t in (5, 20):
            ids[:2] = torch.tensor([rows - 1, rows - 3] if t == 5 else [rows - 2, rows - 4])
        twins.step(reading(ids), sign * scale)
    twins.step(reading(torch.tensor([rows - 1, rows - 2])), sign * scale)
    twins.assert_same()


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_every_read_and_the_flushed_table_are_torchs(backend: str, variant: dict[str, Any]) -> None:
    if LONG:
        rows, count = (800, 24) if backend == "numba" else (60, 4)
        run(3000, rows, count, **variant)
    elif backend == "numba":
        run(None, 300, 12, **variant)
    elif len(variant) == 1 and "weight_decay" in variant:
        run(None, 40, 3, **variant)
    else:  # momentum that acts for 57 steps, not for 374, and a second moment that fades ten times as fast
        run(None, 40, 3, **({"betas": (0.5, 0.99)} | variant))


@only_long
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("eps", [1e-8, 1e-6, 1e-3])
@pytest.mark.parametrize(
    "options",
    [{}, {"weight_decay": 0.01}, {"weight_decay": 1.0}, {"amsgrad": True}, {"maximize": True}]
    + [{"betas": betas} for betas in ((0.9, 0.95), (0.5, 0.99), (0.0, 0.99))],
    ids=str,
)
def test_every_combination(schedule: str, eps: float, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROWSTEP_BACKEND", "numba")
    for scale in (1e-9, 1e-6, 1e-3, 1.0):
        run(3000, 500, 16, schedule=schedule, eps=eps, scale=scale, **options)


def wait(twins: Twins, tables: list[int], steps: int) -> None:
    """Steps in which some tables of a list get gradients that name no row, and the others none."""
    twins.each(lambda model, optimizer: optimizer.zero_grad())
    for number in tables:
        param, twin = twins.model[number].weight, twins.twin[number].weight
        param.grad, twin.grad = rows_of(param, []), torch.zeros_like(twin)
    for step in range(steps):
        twins.set(lr=1e-3 * (1 + step % 7))
        twins.each(lambda model, optimizer: optimizer.step())


def test_rows_may_wait_for_longer_than_past_steps_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are brought up to date in turn before that. It is 14,334 steps, and in a short run an eighth of them."""
    monkeypatch.setenv("ROWSTEP_BACKEND", "numba")
    usual, part = Path.__init__, 1 if LONG else 8

    def with_a_short_memory(path: Path, *args: Any, **options: Any) -> None:
        usual(path, *args, **options)
        path.capacity, path.longest_wait = path.capacity // part, path.longest_wait // part

    monkeypatch.setattr(Path, "__init__", with_a_short_memory)
    twins = Twins(nn.ModuleList([embedding(7)]), betas=(0.5, 0.99), lr=1e-3, weight_decay=0.5)
    twins.theirs.param_groups[0].update(fused=True, foreach=False)
    twins.step(lambda model: model[0](torch.arange(7)))
    for _ in range(4 if LONG else 1):
        wait(twins, [0], 16_500 // part)
        twins.step(lambda model: model[0](torch.tensor([0, 2, 6])))
    twins.assert_same()


@pytest.mark.usefixtures("backend")
def test_tables_that_take_the_same_steps_and_then_part() -> None:
    """They share what is known of past steps, one behind the other, until one of them takes another step."""
    twins = Twins(nn.ModuleList([embedding(5), embedding(5)]), betas=(0.5, 0.99), lr=1e-3, weight_decay=0.5)
    twins.step(lambda model: model[0](torch.arange(5)) + model[1](torch.arange(5)))
    wait(twins, [0, 1], 30)
    wait(twins, [0], 5)
    wait(twins, [1], 5)
    twins.set(weight_decay=0.1)
    wait(twins, [1], 30)
    wait(twins, [0, 1], 30)
    twins.assert_same()

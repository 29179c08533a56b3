"""One model under two optimizers that must agree: ours with sparse gradients, torch's with dense ones."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rowstep import DeferredAdam, DeferredAdamW
from tests.helpers.gradients import step_with

# How far a float64 run may be from torch's, at any read and at the end.
BAR = 1e-13

# A momentum below this is 0: float64's smallest number that has all its digits.
TINY = 2.0**-1022

# `make stress` sets it: the same tests over the full number of steps and every combination.
LONG = os.environ.get("ROWSTEP_LONG") == "1"
only_long = pytest.mark.skipif(not LONG, reason="takes minutes; ROWSTEP_LONG=1 runs it")

RATE = 0.01

# Learning rates by step. The stretch without any is longer than the momentum of a row acts (374 steps by default).
SCHEDULES: dict[str, Callable[[int], float]] = {
    "constant": lambda t: RATE,
    "cosine": lambda t: RATE * (1 + math.cos(math.pi * t / 1000)) / 2,
    "warm-up": lambda t: RATE * min(1.0, t / 100),
    "restart": lambda t: RATE * (1 + math.cos(math.pi * (t % 150) / 150)) / 2,
    "on/off": lambda t: 0.0 if 100 <= t % 600 < 500 else RATE,
}


Forward = Callable[[Any], Tensor]


def embedding(
    rows: int = 40, columns: int = 3, *, sparse: bool = True, dtype: torch.dtype = torch.float64, **options: Any
) -> nn.Embedding:
    """A float64 table that gives sparse gradients."""
    return nn.Embedding(rows, columns, sparse=sparse, dtype=dtype, **options)


def bag(rows: int = 40, columns: int = 3, **options: Any) -> nn.EmbeddingBag:
    return nn.EmbeddingBag(rows, columns, sparse=True, dtype=torch.float64, **options)


def reading(*inputs: Tensor) -> Forward:
    """The forward pass of a model on these inputs."""
    return lambda model: model(*inputs)


def with_dense_gradients(model: nn.Module) -> Any:
    """A copy of the model whose embeddings give dense gradients."""
    dense = copy.deepcopy(model)
    for module in dense.modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            module.sparse = False
    return dense


def zipf(rows: int, count: int) -> Tensor:
    """Ids of which few are frequent and most are rare."""
    return torch.multinomial(1 / torch.arange(1.0, rows + 1) ** 1.1, count, replacement=True)


def distance(one: Tensor, other: Tensor) -> float:
    """The largest difference of two tensors; NaN is as far away as can be."""
    if one.numel() == 0 and one.shape == other.shape:
        return 0.0
    return (one.detach() - other.detach()).abs().nan_to_num(nan=math.inf).max().item()


def in_memory(tensor: Tensor) -> Tensor:
    """What lies in memory just now, whether rows wait or not."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach().clone()


def rms(one: Tensor, other: Tensor) -> float:
    return (one.detach().double() - other.detach().double()).square().mean().sqrt().item()


def optimizers(
    ours: Any, theirs: Any, weight_decay: float | None = None, allow_stale: bool = False, **options: Any
) -> tuple[DeferredAdam, Optimizer]:
    """DeferredAdam and torch's Adam, or with a weight decay (0 is one) DeferredAdamW and torch's AdamW."""
    theirs = theirs.parameters() if isinstance(theirs, nn.Module) else theirs
    if weight_decay is None:
        return DeferredAdam(ours, allow_stale=allow_stale, **options), torch.optim.Adam(theirs, **options)
    return (
        DeferredAdamW(ours, weight_decay=weight_decay, allow_stale=allow_stale, **options),
        torch.optim.AdamW(theirs, weight_decay=weight_decay, **options),
    )


def step_caught_up(optimizer: Optimizer, param: Tensor, grad: Tensor) -> None:
    """A step with this sparse gradient for rows that were brought up to date, as if before they were read."""
    if isinstance(optimizer, DeferredAdam):
        optimizer.catch_up(param, grad._indices()[0])
        step_with(optimizer, param, grad)
    else:
        step_with(optimizer, param, grad.to_dense())


class Twins:
    """A model and its dense twin, and the optimizer of each. Without options: AdamW with a weight decay of 0.1."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        options = options or {"weight_decay": 0.1, "lr": RATE}
        self.model: Any = model
        self.twin = with_dense_gradients(model)
        self.ours, self.theirs = optimizers(self.model, self.twin, **options)

    def each(self, action: Callable[[Any, Any], object]) -> None:
        """Do the same on both sides; ``action`` gets a model and its optimizer."""
        action(self.model, self.ours)
        action(self.twin, self.theirs)

    def set(self, **options: Any) -> None:
        """Change options of both optimizers, in all groups."""
        for optimizer in (self.ours, self.theirs):
            for group in optimizer.param_groups:
                group.update(options)

    def backward(self, forward: Forward, scale: float = 1.0) -> None:
        """Read on both sides, compare what was read, and go backward from how far it is from a random goal.

        Nothing read is at its goal: of a gradient that is all but 0, Adam's first step makes a whole lr, and so it does
        of how torch has rounded the weight until then (4.7e-13 was seen for a read 2e-5 from its goal).
        """
        reads = [forward(self.model), forward(self.twin)]
        apart = distance(*reads)
        assert apart <= BAR, apart
        far = reads[1].detach() - torch.randn_like(reads[1])
        goal = reads[1].detach() - far - 0.1 * far.sign()
        for read in reads:
            torch.autograd.backward(scale * (read - goal).square().mean())

    def step(self, forward: Forward, scale: float = 1.0) -> None:
        """A whole step on both sides."""
        self.each(lambda model, optimizer: optimizer.zero_grad())
        self.backward(forward, scale)
        self.each(lambda model, optimizer: optimizer.step())

    def look_up(self, *ids: int) -> None:
        """A whole step of a model that is one embedding."""
        self.step(reading(torch.tensor(ids, dtype=torch.int64)))

    def run(self, steps: int, *, rows: int, count: int = 4) -> None:
        """Steps of a model that is one embedding, with Zipf ids."""
        for _ in range(steps):
            self.look_up(*zipf(rows, count).tolist())

    def assert_same(self) -> None:
        """Weights, moments and steps of the flushed tables are torch's."""
        self.ours.flush()
        for one, other in zip(self.model.parameters(), self.twin.parameters(), strict=True):
            assert_same_parameter(self.ours, one, self.theirs, other)


def waiting(model: nn.Module | None = None, **options: Any) -> Twins:
    """Twins in the middle of a run. Of the 40 rows, half have not been read since the first step, and wait."""
    twins = Twins(embedding() if model is None else model, **options)
    twins.look_up(*range(40))
    twins.run(10, rows=20)
    return twins


def assert_same_parameter(ours: Optimizer, one: Tensor, theirs: Optimizer, other: Tensor) -> None:
    assert distance(one, other) <= BAR
    state, expected = ours.state.get(one, {}), theirs.state.get(other, {})
    assert state.keys() == expected.keys()
    for key, value in expected.items():
        if key == "step":
            assert state[key] == value
        else:
            largest = value.abs().max().item() if value.numel() else 0.0
            assert distance(state[key], value) <= BAR * largest + TINY, key

"""A run to disturb: whatever happens in a step, each parameter must have taken its step whole or not at all."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rowstep import DeferredAdam, DeferredAdamW, SparseAdam
from tests.helpers.deferred_cases import distance
from tests.helpers.gradients import rows_of

OPTIONS: dict[str, tuple[Callable[..., Optimizer], dict[str, Any]]] = {
    "sparse": (SparseAdam, {}),
    "all of sparse": (
        SparseAdam,
        {"amsgrad": True, "bias_correction": "row", "nonfinite": "skip", "weight_decay": 0.1, "maximize": True},
    ),
    "deferred": (DeferredAdam, {"betas": (0.8, 0.9)}),
    "decayed": (DeferredAdamW, {"amsgrad": True, "weight_decay": 0.5}),
    "by row": (SparseAdam, {"second_moment": "row", "betas": (0.0, 0.9)}),
}


class Run:
    """Two tables and two dense parameters, one of them with strides of its own, after some steps.

    Every step has the same gradients, so that a parameter's count of steps tells where it must be.
    """

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        cls, options = OPTIONS[name]
        shapes = [(7, 3), (5, 2), (4, 3), (3, 4)]
        self.params = [nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in shapes]
        self.params[3].data = self.params[3].data.t()
        self.grads: list[Tensor] = [
            rows_of(self.params[0], [1, 4, 4, 6]),
            rows_of(self.params[1], [0, 3]),
            torch.randn_like(self.params[2]),
            torch.randn_like(self.params[3]),
        ]
        self.optimizer: Any = cls(self.params, lr=0.05, **options)
        for _ in range(3):
            self.step()
        if isinstance(self.optimizer, DeferredAdam):  # let rows wait that are not in the gradient
            self.params[0].grad = rows_of(self.params[0], [0, 1, 2, 3])
            self.optimizer.catch_up(self.params[0], torch.arange(7))
            self.step_only(0)

    def step(self) -> None:
        for param, grad in zip(self.params, self.grads, strict=True):
            if grad.is_sparse and isinstance(self.optimizer, DeferredAdam):  # as if its rows had been read
                self.optimizer.catch_up(param, grad._indices()[0])
            param.grad = grad
        self.optimizer.step()

    def step_only(self, *numbers: int) -> None:
        for number, param in enumerate(self.params):
            if number not in numbers:
                param.grad = None
        self.optimizer.step()

    def counts(self) -> list[int]:
        return [int(self.optimizer.state[param]["step"]) for param in self.params]

    def results(self) -> list[dict[str, Tensor]]:
        """Weights and state of each parameter, with nothing left to wait."""
        saved = self.optimizer.state_dict()["state"]
        tensors = [{key: torch.as_tensor(value).double() for key, value in saved[i].items()} for i in range(4)]
        return [copy.deepcopy(state | {"p": param.detach()}) for param, state in zip(self.params, tensors, strict=True)]


def trajectories(name: str, steps: int) -> list[dict[int, dict[str, Tensor]]]:
    """For each parameter, what it is after each count of steps."""
    found: list[dict[int, dict[str, Tensor]]] = [{} for _ in range(4)]
    run = Run(name)
    for _ in range(steps + 1):
        for known, count, result in zip(found, run.counts(), run.results(), strict=True):
            known[count] = result
        run.step()
    return found


def assert_on_its_way(run: Run, expected: list[dict[int, dict[str, Tensor]]], of: int = 4) -> None:
    for known, result in list(zip(expected, run.results(), strict=True))[:of]:
        count = int(result["step"])
        assert result.keys() == known[count].keys()
        for key, value in known[count].items():
            assert distance(result[key], value) <= 1e-12, (key, count)

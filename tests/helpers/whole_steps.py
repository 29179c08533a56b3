"""A run to disturb: whatever happens in a step, a parameter has taken it, has not, or had no gradient in it."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Iterable
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

    def step(self, lost: bool = False) -> None:
        """Step all; with ``lost``, as if the tables had no gradient."""
        for param, grad in zip(self.params, self.grads, strict=True):
            if grad.is_sparse and isinstance(self.optimizer, DeferredAdam):  # as if its rows had been read
                self.optimizer.catch_up(param, grad._indices()[0])
            param.grad = rows_of(param, []) if lost and grad.is_sparse else grad
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


Trajectory = dict[int, dict[str, Tensor]]
"""What a parameter is after each count of steps."""


def trajectories(name: str, steps: int) -> list[list[Trajectory]]:
    """For each parameter what it may be: after whole steps, and if one of them was counted without its gradient."""
    return _trajectories(name, steps, os.environ.get("ROWSTEP_BACKEND"))


@functools.cache
def _trajectories(name: str, steps: int, backend: str | None) -> list[list[Trajectory]]:
    found: list[list[Trajectory]] = [[] for _ in range(4)]
    for lost in (None, *range(steps)):
        run, ways = Run(name), [dict[int, dict[str, Tensor]]() for _ in range(4)]
        for number in range(steps + 1):
            for way, count, result in zip(ways, run.counts(), run.results(), strict=True):
                way[count] = result
            run.step(lost=number == lost)
        for known, way in zip(found, ways, strict=True):
            known.append(way)
    return found


def assert_on_its_way(run: Run, expected: list[list[Trajectory]], of: int = 4) -> None:
    """The first parameters, ``of`` all, are where they may be. The dense ones, the last, are in torch's hands."""
    for ways, result in list(zip(expected, run.results(), strict=True))[:of]:
        count = int(result["step"])
        assert any(_is_same(result, way[count]) for way in ways if count in way), (count, result)


def assert_steps_survive(name: str, disturbed: Iterable[Run]) -> None:
    """After a step in which something happened, a parameter has taken it or has not; and the run goes on."""
    expected, start, taken = trajectories(name, 3), Run(name).counts(), set()
    for run in disturbed:
        after = run.counts()
        assert all(count in (before, before + 1) for before, count in zip(start, after, strict=True))
        taken.add(tuple(after))
        assert_on_its_way(run, expected, of=2)
        run.step()
        run.step()
        assert_on_its_way(run, expected, of=2)
    assert len(taken) >= 2  # it happened before and after the count


def besides_steps(run: Run) -> dict[str, Callable[[], object]]:
    """What a deferred optimizer does between its steps."""
    optimizer = run.optimizer
    return {
        "flush": optimizer.flush,
        "state_dict": optimizer.state_dict,
        "catch_up": lambda: optimizer.catch_up(run.params[0], torch.tensor([5, 0, 5])),
        "eps": lambda: optimizer.param_groups[0].update(eps=1e-8) or optimizer.flush(),  # the same, as another object
        "load_state_dict": lambda: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())),
    }


def assert_waiting_survives(disturbed: Iterable[Run]) -> None:
    """After something happened between the steps of "decayed", tables are where they were, and the run goes on."""
    expected = trajectories("decayed", 2)
    for run in disturbed:
        assert_on_its_way(run, expected, of=2)
        run.step()
        assert_on_its_way(run, expected, of=2)


def _is_same(result: dict[str, Tensor], known: dict[str, Tensor]) -> bool:
    return result.keys() == known.keys() and all(distance(result[key], known[key]) <= 1e-12 for key in known)

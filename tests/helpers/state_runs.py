"""Optimizers whose state something will be done to."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rowstep import DeferredAdam, SparseAdam
from tests.helpers.copies import through_a_file
from tests.helpers.gradients import Snapshot, rows_of, table

KINDS = pytest.mark.parametrize("kind", [SparseAdam, DeferredAdam])
Kind = type[SparseAdam | DeferredAdam]
State = dict[str, Any]


class Run:
    """Two tables and a dense parameter after a step, the second table last in line."""

    def __init__(self, kind: Kind) -> None:
        self.params = [("first", table(6, 3)), ("dense", table(2, 3)), ("last", table(6, 3))]
        options: dict[str, Any] = {"bias_correction": "row"} if kind is SparseAdam else {}
        self.optimizer: Any = kind(self.params, lr=0.1, amsgrad=True, **options)
        self.last = self.params[-1][1]
        self.step()

    def step(self) -> None:
        for name, param in self.params:
            if isinstance(self.optimizer, DeferredAdam) and name != "dense":
                self.optimizer.catch_up(param, torch.tensor([1, 4]))
            param.grad = torch.ones_like(param) if name == "dense" else rows_of(param, [1, 4], 1.0)
        self.optimizer.step()

    def saved(self) -> dict[str, Any]:
        """Its state dict, by way of a file."""
        saved: dict[str, Any] = through_a_file(self.optimizer.state_dict())
        return saved


def assert_refused(run: Run, action: Callable[[], object], message: str) -> None:
    before, groups = Snapshot(run.optimizer), copy.deepcopy(run.optimizer.state_dict()["param_groups"])
    with pytest.raises(ValueError, match=message):
        action()
    before.assert_unchanged()
    assert run.optimizer.state_dict()["param_groups"] == groups

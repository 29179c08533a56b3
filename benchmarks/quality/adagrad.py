"""Row-wise Adagrad, the usual optimizer with one number of state per row: a peer that rowstep does not offer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn


class RowwiseAdagrad(torch.optim.Optimizer):
    """A row's rate is lr over the root of the sum, over its steps, of the mean square of its gradient."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, eps: float = 1e-8) -> None:
        super().__init__(params, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise ValueError("a closure was given; expected none")
        for group in self.param_groups:
            for table in group["params"]:
                if table.grad is not None:
                    self._step_rows(table, table.grad.coalesce(), group)

    def _step_rows(self, table: nn.Parameter, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        rows, values = gradient.indices()[0], gradient.values()
        state = self.state[table]
        if not state:
            state["sum"] = torch.zeros(len(table))
        state["sum"].index_add_(0, rows, values.square().mean(1))
        scale = state["sum"][rows].sqrt_().add_(group["eps"]).unsqueeze(1)
        table.index_add_(0, rows, values / scale, alpha=-float(group["lr"]))

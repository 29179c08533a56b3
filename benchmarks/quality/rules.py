"""The rules that step the tables: what is kept per weight and per row, from all of Adam's state to next to none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.quality.adagrad import RowwiseAdagrad
from rowstep import DeferredAdam, SparseAdam

Make = Callable[[Sequence[nn.Parameter], float], torch.optim.Optimizer]

NO_MOMENTUM = (0.0, 0.999)


@dataclass(frozen=True)
class Rule:
    name: str
    make: Make  # of tables and their learning rate
    dense: bool = False  # the kind of gradient that the tables get


def _rowstep(kind: Callable[..., torch.optim.Optimizer], **options: Any) -> Make:
    return lambda tables, rate: partial(kind, **options)(tables, lr=rate)


def _adagrad(tables: Sequence[nn.Parameter], rate: float) -> torch.optim.Optimizer:
    return RowwiseAdagrad(tables, rate)


ADAM = Rule("SparseAdam", _rowstep(SparseAdam))
DEFERRED = Rule("DeferredAdam", _rowstep(DeferredAdam))
ADAGRAD = Rule("row-wise Adagrad", _adagrad)
RULES = (
    ADAM,
    DEFERRED,
    Rule("bfloat16", _rowstep(SparseAdam, state_dtype=torch.bfloat16)),
    Rule("row", _rowstep(SparseAdam, second_moment="row")),
    Rule("bfloat16 + row", _rowstep(SparseAdam, state_dtype=torch.bfloat16, second_moment="row")),
    Rule("row, β₁ = 0", _rowstep(SparseAdam, betas=NO_MOMENTUM, second_moment="row")),
    Rule("factored, β₁ = 0", _rowstep(SparseAdam, betas=NO_MOMENTUM, second_moment="factored")),
    Rule("factored, β₁ = 0, deferred", _rowstep(DeferredAdam, betas=NO_MOMENTUM, second_moment="factored")),
    ADAGRAD,
)
WITH_ALL_STATE = (ADAM.name, DEFERRED.name)


def state_bytes(optimizer: torch.optim.Optimizer) -> float:
    """Per weight, of all tensors that the optimizer keeps."""
    tables = [table for group in optimizer.param_groups for table in group["params"]]
    kept = [value for table in tables for value in optimizer.state[table].values() if isinstance(value, Tensor)]
    return sum(int(value.nbytes) for value in kept) / sum(int(table.numel()) for table in tables)

"""The rules that step the tables: Adam as published, which moves every row at every step, and what is cheaper."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial

import torch
from torch import nn

from rowstep import DeferredAdam, DeferredAdamW, SparseAdam

FIRST_DECAY = 0.1


class Kind(Enum):
    DENSE = "dense: every row moves at every step"
    LAZY = "lazy: only rows with a gradient move"
    SMALL = "lazy, with less state than Adam's"
    PEER = "not rowstep's"


@dataclass(frozen=True)
class Settings:
    rate: float
    decay: float = 0.0  # decoupled, as AdamW's

    @property
    def about(self) -> str:
        return f"{self.rate:g}" + f", decay {self.decay:g}" * bool(self.decay)


@dataclass(frozen=True)
class Rule:
    """Rules that compute the same take the settings tuned for their twin, so that they can be compared seed by seed."""

    name: str
    make: Callable[..., torch.optim.Optimizer]  # of tables and lr, and of weight_decay if that is tuned
    kind: Kind = Kind.LAZY
    dense: bool = False  # the kind of gradient that its tables get
    like: str | None = None  # whose settings it takes; None: its own are tuned
    decays: bool = False
    dtype: torch.dtype = torch.float32

    def optimizer(self, tables: Sequence[nn.Parameter], settings: Settings) -> torch.optim.Optimizer:
        options = {"weight_decay": settings.decay} if self.decays else {}
        return self.make(tables, lr=settings.rate, **options)


class RowwiseAdagrad(torch.optim.Optimizer):
    """The usual optimizer with one number of state per row, which rowstep does not offer.

    A row's rate is lr over the root of the sum, over its steps, of the mean square of its gradient.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float, eps: float = 1e-8) -> None:
        super().__init__(params, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        for table in group["params"]:
            gradient = table.grad.coalesce()
            rows, values = gradient.indices()[0], gradient.values()
            total = self.state[table].setdefault("sum", torch.zeros(len(table)))
            total.index_add_(0, rows, values.square().mean(1))
            rates = group["lr"] / total[rows].sqrt_().add_(group["eps"])
            table.index_add_(0, rows, values * rates.unsqueeze(1), alpha=-1)


_bfloat16 = partial(SparseAdam, state_dtype=torch.bfloat16)
_row = partial(SparseAdam, second_moment="row")
_row_no_first = partial(_row, betas=(0.0, 0.999))
_fused_adam = partial(torch.optim.Adam, fused=True)
_fused_adamw = partial(torch.optim.AdamW, fused=True)

# From all of Adam's state to next to none, each with a rate of its own.
SPARSE = Rule("SparseAdam", SparseAdam)
ADAGRAD = Rule("row-wise Adagrad", RowwiseAdagrad, Kind.PEER)
BY_STATE = (
    SPARSE,
    Rule("DeferredAdam", DeferredAdam, Kind.DENSE),
    Rule("bfloat16", _bfloat16, Kind.SMALL),
    Rule("row", _row, Kind.SMALL),
    Rule("bfloat16 + row", partial(_bfloat16, second_moment="row"), Kind.SMALL),
    Rule("row, β₁ = 0", _row_no_first, Kind.SMALL),
    ADAGRAD,
)

# Those that are compared with dense Adam.
ADAM = Rule("Adam (dense)", _fused_adam, Kind.DENSE, dense=True)
ADAMW = Rule("AdamW (dense)", _fused_adamw, Kind.DENSE, dense=True, decays=True)
DEFERRED = Rule("DeferredAdam", DeferredAdam, Kind.DENSE, like=ADAM.name)
BESIDE_ADAM = (
    ADAM,
    DEFERRED,
    ADAMW,
    Rule("DeferredAdamW", DeferredAdamW, Kind.DENSE, like=ADAMW.name, decays=True),
    SPARSE,
    Rule("torch's SparseAdam", torch.optim.SparseAdam, like=SPARSE.name),
    Rule("SparseAdam, Adam's rate", SparseAdam, like=ADAM.name),
    Rule("SparseAdam, row bias correction", partial(SparseAdam, bias_correction="row")),
    Rule("SparseAdam, decoupled decay", partial(SparseAdam, decoupled_weight_decay=True), decays=True),
    Rule("SparseAdam, bfloat16 state", _bfloat16, Kind.SMALL),
    Rule("SparseAdam, row", _row, Kind.SMALL),
    Rule("SparseAdam, row, β₁ = 0", _row_no_first, Kind.SMALL),
)

# Only for the question whether DeferredAdam is dense Adam. torch's own Adam rounds differently when it is not fused, so
# the distance between torch's two is what rounding does to a training. In float64 that is too little to be seen.
UNFUSED = Rule("Adam (dense), not fused", torch.optim.Adam, dense=True, like=ADAM.name)
ADAM_IN_DOUBLE = Rule("Adam (dense), float64", _fused_adam, dense=True, like=ADAM.name, dtype=torch.float64)
DEFERRED_IN_DOUBLE = Rule("DeferredAdam, float64", DeferredAdam, like=ADAM.name, dtype=torch.float64)
CONTROLS = (UNFUSED, ADAM_IN_DOUBLE, DEFERRED_IN_DOUBLE)

# Two that compute the same, up to rounding.
TWINS = {
    "DeferredAdam and dense Adam, float64": (ADAM_IN_DOUBLE, DEFERRED_IN_DOUBLE),
    "DeferredAdam and dense Adam, float32": (ADAM, DEFERRED),
    "torch's Adam, fused and not, float32": (ADAM, UNFUSED),
}

"""Who takes part: Adam as published, which moves every row at every step, and what is cheaper.

Rules that compute the same take the settings that were tuned for their twin, so that they can be compared seed by seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial

import torch
from torch import nn

from benchmarks.quality.rules import NO_MOMENTUM, Rule
from rowstep import DeferredAdam, DeferredAdamW, SparseAdam

FIRST_DECAY = 0.1


class Kind(Enum):
    DENSE = "dense: every row moves at every step"
    LAZY = "lazy: only rows with a gradient move"
    SMALL = "lazy, with less state than Adam's"


@dataclass(frozen=True)
class Settings:
    rate: float
    decay: float = 0.0  # decoupled, as AdamW's

    @property
    def about(self) -> str:
        return f"{self.rate:g}" + f", decay {self.decay:g}" * bool(self.decay)


@dataclass(frozen=True)
class Contestant:
    name: str
    make: Callable[..., torch.optim.Optimizer]  # of tables and lr, and of weight_decay if that is tuned
    dense: bool = False  # the kind of gradient that its tables get
    like: str | None = None  # whose settings it takes; None: its own are tuned
    decays: bool = False
    dtype: torch.dtype = torch.float32
    kind: Kind = Kind.LAZY

    def rule(self, settings: Settings) -> Rule:
        options = {"weight_decay": settings.decay} if self.decays else {}

        def make(tables: Sequence[nn.Parameter], rate: float) -> torch.optim.Optimizer:
            return self.make(tables, lr=rate, **options)

        return Rule(self.name, make, self.dense)


_fused_adam = partial(torch.optim.Adam, fused=True)
_fused_adamw = partial(torch.optim.AdamW, fused=True)
_row = partial(SparseAdam, second_moment="row")
_factored = partial(SparseAdam, second_moment="factored")

ADAM = Contestant("Adam (dense)", _fused_adam, dense=True, kind=Kind.DENSE)
DEFERRED = Contestant("DeferredAdam", DeferredAdam, like=ADAM.name, kind=Kind.DENSE)
ADAMW = Contestant("AdamW (dense)", _fused_adamw, dense=True, decays=True, kind=Kind.DENSE)
SPARSE = Contestant("SparseAdam", SparseAdam)

CONTESTANTS = (
    ADAM,
    DEFERRED,
    ADAMW,
    Contestant("DeferredAdamW", DeferredAdamW, like=ADAMW.name, decays=True, kind=Kind.DENSE),
    SPARSE,
    Contestant("torch's SparseAdam", torch.optim.SparseAdam, like=SPARSE.name),
    Contestant("SparseAdam, Adam's rate", SparseAdam, like=ADAM.name),
    Contestant("SparseAdam, row bias correction", partial(SparseAdam, bias_correction="row")),
    Contestant("SparseAdam, decoupled decay", partial(SparseAdam, decoupled_weight_decay=True), decays=True),
    Contestant("SparseAdam, bfloat16 state", partial(SparseAdam, state_dtype=torch.bfloat16), kind=Kind.SMALL),
    Contestant("SparseAdam, row", _row, kind=Kind.SMALL),
    Contestant("SparseAdam, row, β₁ = 0", partial(_row, betas=NO_MOMENTUM), kind=Kind.SMALL),
    Contestant("SparseAdam, factored, β₁ = 0", partial(_factored, betas=NO_MOMENTUM), kind=Kind.SMALL),
)

# Only for the question whether DeferredAdam is dense Adam. torch's own Adam rounds differently when it is not fused, so
# the distance between torch's two is what rounding does to a training. In float64 that is too little to be seen.
UNFUSED = Contestant("Adam (dense), not fused", torch.optim.Adam, dense=True, like=ADAM.name)
ADAM_IN_DOUBLE = Contestant("Adam (dense), float64", _fused_adam, dense=True, like=ADAM.name, dtype=torch.float64)
DEFERRED_IN_DOUBLE = Contestant("DeferredAdam, float64", DeferredAdam, like=ADAM.name, dtype=torch.float64)
CONTROLS = (UNFUSED, ADAM_IN_DOUBLE, DEFERRED_IN_DOUBLE)


@dataclass(frozen=True)
class Twins:
    """Two that compute the same, up to rounding."""

    about: str
    one: str
    other: str


IN_DOUBLE = Twins("DeferredAdam and dense Adam, float64", ADAM_IN_DOUBLE.name, DEFERRED_IN_DOUBLE.name)
TWINS = (
    IN_DOUBLE,
    Twins("DeferredAdam and dense Adam, float32", ADAM.name, DEFERRED.name),
    Twins("torch's Adam, fused and not, float32", ADAM.name, UNFUSED.name),
)

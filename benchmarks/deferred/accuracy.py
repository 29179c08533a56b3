"""How near DeferredAdam comes to dense Adam, on a table small enough to step densely thousands of times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from benchmarks import cases
from benchmarks.cases import Case, short
from benchmarks.contenders import DisagreementError
from rowstep import DeferredAdam

LARGEST_DIFFERENCE = 1e-13


@dataclass(frozen=True)
class Accuracy:
    about: str
    float64: float  # the largest difference from dense Adam in float64, over every row read and the flushed table
    float32: float  # root mean square distance of DeferredAdam in float32 to dense Adam in float64
    torch_float32: float  # the same of dense Adam in float32

    def check(self) -> None:
        if not self.float64 <= LARGEST_DIFFERENCE:
            raise DisagreementError(
                f"DeferredAdam's weights differ from dense Adam's by up to {self.float64:.2e} in float64; "
                "their times cannot be compared"
            )


class _Run:
    """One optimizer in one precision, with a learning rate that falls."""

    def __init__(self, kind: type[torch.optim.Optimizer], start: Tensor, steps: int) -> None:
        self.table = nn.Parameter(start.clone())
        # Optimizer itself has no default for lr, though both of its subclasses here do.
        self.optimizer = kind([self.table], lr=1e-3)  # type: ignore[call-arg]
        self.schedule = CosineAnnealingLR(self.optimizer, steps)

    def read(self, ids: Tensor) -> Tensor:
        return nn.functional.embedding(ids, self.table).detach()

    def step(self, gradient: Tensor) -> None:
        gradient = gradient.to(self.table.dtype)
        self.table.grad = gradient if isinstance(self.optimizer, DeferredAdam) else gradient.to_dense()
        self.optimizer.step()
        self.schedule.step()


def compare(case: Case, batches: int, steps: int) -> Accuracy:
    start = cases.parameters(case)[0].detach()
    exact, rounded = (_Run(torch.optim.Adam, start.to(dtype), steps) for dtype in (torch.float64, torch.float32))
    ours, ours_rounded = (_Run(DeferredAdam, start.to(dtype), steps) for dtype in (torch.float64, torch.float32))
    pool = _gradients_of_all_sizes(case, batches)
    difference = 0.0
    for number in range(steps):
        gradient = pool[number % len(pool)]
        ids = gradient._indices()[0]
        difference = max(difference, _largest(ours.read(ids) - exact.read(ids)))
        ours_rounded.read(ids)
        for run in (exact, rounded, ours, ours_rounded):
            run.step(gradient)
    everything = torch.arange(case.rows)
    truth = exact.read(everything)
    return Accuracy(
        f"{short(case.rows)} x {case.dim}, {case.ids} Zipf ids, {steps:,} steps",
        max(difference, _largest(ours.read(everything) - truth)),
        *(_rms(run.read(everything) - truth) for run in (ours_rounded, rounded)),
    )


def _gradients_of_all_sizes(case: Case, batches: int) -> Sequence[Tensor]:
    """From 1 in the first column down to a millionth in the last, where eps counts.

    Powers of two, so that sums of duplicates stay exact in float32: it is the optimizers that are compared.
    """
    scale = torch.exp2(-torch.linspace(0, 20, case.dim).round())
    pool = [gradients[0] for gradients in cases.gradients(case, batches)]
    return [cases.gradient(case, given._indices()[0], given._values() * scale) for given in pool]


def _largest(difference: Tensor) -> float:
    return difference.abs().max().item()


def _rms(difference: Tensor) -> float:
    return difference.square().mean().sqrt().item()

"""A matrix with a planted factorisation, learned by three optimizers from the same weights and the same batches.

A few users and items are in every batch, most are rare. The loss is held out and counts every user and item alike, so
it shows what becomes of the rare ones. Dense Adam goes on moving a rare row after its gradient, by ten times what the
first step gave it; SparseAdam lets it rest, and falls behind at the same learning rate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from benchmarks.cases import popularity
from benchmarks.timing import threads
from rowstep import DeferredAdam, SparseAdam

DENSE, DEFERRED, SPARSE = "dense Adam", "DeferredAdam", "SparseAdam"
COLOURS = {DENSE: "#f2a65a", DEFERRED: "#1b4d7a", SPARSE: "#b5525c"}

LEARNING_RATE = 0.01
NOISE = 0.1  # of a rating, whose own standard deviation is 1
HELD_OUT = 20_000
EVALUATIONS = 100


@dataclass(frozen=True)
class Problem:
    users: int
    items: int
    dim: int
    batch: int
    steps: int

    @property
    def about(self) -> str:
        return f"{self.users:,} x {self.items:,} matrix of rank {self.dim}, {self.batch} Zipf-drawn ratings a step"


@dataclass
class Curves:
    about: str
    steps: list[int] = field(default_factory=list)
    losses: dict[str, list[float]] = field(default_factory=lambda: {DENSE: [], DEFERRED: [], SPARSE: []})

    def distances(self, name: str) -> list[float]:
        """How far this optimizer's loss is from dense Adam's."""
        return [abs(a - b) for a, b in zip(self.losses[name], self.losses[DENSE], strict=True)]

    @property
    def sentence(self) -> str:
        ours, sparse = (max(self.distances(name)) for name in (DEFERRED, SPARSE))
        return (
            f"{self.about}: the held-out losses of DeferredAdam and dense Adam differ by at most {ours:.1e}, "
            f"those of SparseAdam and dense Adam by up to {sparse:.1e}."
        )


_Ratings: TypeAlias = tuple[Tensor, Tensor, Tensor]  # users, items and their ratings, each (n,)


class _Factors(nn.Module):
    def __init__(self, problem: Problem, *, scale: float, seed: int, sparse: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        rows, dim = (problem.users, problem.items), problem.dim
        weights = [scale * torch.randn(count, dim, generator=generator) for count in rows]
        self.users, self.items = (nn.Embedding(len(each), dim, sparse=sparse, _weight=each) for each in weights)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        ratings: Tensor = (self.users(users) * self.items(items)).sum(1)
        return ratings

    def loss(self, data: _Ratings) -> Tensor:
        *ids, ratings = data
        return nn.functional.mse_loss(self(*ids), ratings)


def learn(problem: Problem) -> Curves:
    curves = Curves(problem.about)
    models = {name: _Factors(problem, scale=0.1, seed=1, sparse=name != DENSE) for name in curves.losses}
    optimizers = {
        DENSE: torch.optim.Adam(models[DENSE].parameters(), lr=LEARNING_RATE),
        DEFERRED: DeferredAdam(models[DEFERRED], lr=LEARNING_RATE),
        SPARSE: SparseAdam(models[SPARSE].parameters(), lr=LEARNING_RATE),
    }
    batches = _batches(problem)
    held_out = next(batches)
    every = max(1, problem.steps // EVALUATIONS)
    with threads(1):  # the tables are small: handing work to a second thread costs more than the work
        for step, batch in zip(range(problem.steps + 1), batches, strict=False):
            if step % every == 0:
                curves.steps.append(step)
                for name, model in models.items():
                    with torch.no_grad():
                        curves.losses[name].append(model.loss(held_out).item())
            for name, model in models.items():
                optimizers[name].zero_grad()
                model.loss(batch).backward()  # type: ignore[no-untyped-call]
                optimizers[name].step()
    return curves


def _batches(problem: Problem) -> Iterator[_Ratings]:
    """First what is held out, every user and item alike and without noise; then batches without end."""
    rng = np.random.default_rng(0)
    generator = torch.Generator().manual_seed(2)
    planted = _Factors(problem, scale=problem.dim**-0.25, seed=0, sparse=False).requires_grad_(False)

    def rated(users: np.ndarray, items: np.ndarray, noise: float) -> _Ratings:
        ids = torch.from_numpy(users), torch.from_numpy(items)
        ratings = planted(*ids)
        return *ids, ratings + noise * torch.randn(len(ratings), generator=generator)

    yield rated(rng.integers(problem.users, size=HELD_OUT), rng.integers(problem.items, size=HELD_OUT), 0.0)
    by_user, by_item = popularity(problem.users), popularity(problem.items)
    while True:
        draws = rng.random((2, problem.batch))
        yield rated(by_user.searchsorted(draws[0]), by_item.searchsorted(draws[1]), NOISE)


def draw(figure: Figure, curves: Curves) -> None:
    losses, distances = figure.subplots(2, sharex=True, height_ratios=[2.2, 1])
    # Two curves coincide; dense Adam's is a wide band below, so that both are seen.
    for name, width in ((DENSE, 7), (DEFERRED, 1.5), (SPARSE, 1.5)):
        losses.plot(curves.steps, curves.losses[name], color=COLOURS[name], linewidth=width, label=name)
    for name in (SPARSE, DEFERRED):
        far = curves.distances(name)
        distances.plot(curves.steps, far, color=COLOURS[name], label=f"{name}: at most {max(far):.1g}")
    for axes in (losses, distances):
        axes.set_yscale("log", nonpositive="mask", subs=(2, 5))  # a distance of 0, as at the start, has no place
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    losses.yaxis.set_major_formatter("{x:g}")
    losses.yaxis.set_minor_formatter("{x:g}")
    losses.set_ylabel("held-out loss (mean square)\nall users and items alike")
    distances.set_ylabel("distance to\ndense Adam's loss")
    distances.set_xlabel("step")
    figure.suptitle(
        "DeferredAdam learns rare rows as dense Adam does: held-out loss of three optimizers,\n"
        f"same batches, same learning rate ({LEARNING_RATE:g}); {curves.about}",
        fontsize=11,
    )

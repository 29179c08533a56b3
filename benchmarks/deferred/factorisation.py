"""A matrix with a planted factorisation, learned by three optimizers from the same weights and the same batches.

A few users and items are in every batch, most are rare. The loss is held out and counts every user and item alike, so
it shows what becomes of the rare ones. Dense Adam goes on moving a rare row after its gradient, by ten times what the
first step gave it; SparseAdam lets it rest, and falls behind at the same learning rate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.cases import popularity
from benchmarks.timing import threads
from rowstep import DeferredAdam, SparseAdam

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
        return (
            f"{self.users:,} x {self.items:,} matrix of rank {self.dim}, {self.batch} Zipf-distributed ratings a step"
        )


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


@dataclass(frozen=True)
class _Ratings:
    users: Tensor  # (n,)
    items: Tensor  # (n,)
    ratings: Tensor  # (n,)


class _Factors(nn.Module):
    def __init__(self, problem: Problem, *, scale: float, seed: int, sparse: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.users, self.items = (
            nn.Embedding(
                rows, problem.dim, sparse=sparse, _weight=scale * torch.randn(rows, problem.dim, generator=generator)
            )
            for rows in (problem.users, problem.items)
        )

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        ratings: Tensor = (self.users(users) * self.items(items)).sum(1)
        return ratings

    def loss(self, data: _Ratings) -> Tensor:
        return nn.functional.mse_loss(self(data.users, data.items), data.ratings)


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
        return _Ratings(*ids, ratings + noise * torch.randn(len(ratings), generator=generator))

    yield rated(rng.integers(problem.users, size=HELD_OUT), rng.integers(problem.items, size=HELD_OUT), 0.0)
    by_user, by_item = popularity(problem.users), popularity(problem.items)
    while True:
        draws = rng.random((2, problem.batch))
        yield rated(by_user.searchsorted(draws[0]), by_item.searchsorted(draws[1]), NOISE)


def draw(figure: Figure, curves: Curves) -> None:
    losses, distances = figure.subplots(2, sharex=True, height_ratios=[2.2, 1])
    for axes in (losses, distances):
        axes.set_yscale("log")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    _draw_losses(losses, curves)
    _draw_distances(distances, curves)
    figure.suptitle(
        "DeferredAdam learns rare rows as dense Adam does: held-out loss of three optimizers,\n"
        f"same batches, same learning rate ({LEARNING_RATE:g}); {curves.about}",
        fontsize=11,
    )


def _draw_losses(axes: Axes, curves: Curves) -> None:
    # Two curves coincide; dense Adam's is a wide band below, so that both are seen.
    for name, width in ((DENSE, 7), (DEFERRED, 1.5), (SPARSE, 1.5)):
        axes.plot(curves.steps, curves.losses[name], color=COLOURS[name], linewidth=width, label=name)
    middle = len(curves.steps) // 2
    step = curves.steps[middle]
    _label(axes, SPARSE, SPARSE, (step, curves.losses[SPARSE][middle]), (8, 6))
    _label(axes, DEFERRED, f"{DENSE}\nand {DEFERRED}", (step, curves.losses[DEFERRED][middle]), (-8, -6))
    low, high = axes.get_ylim()
    between = [digit * 10.0**power for power in range(-9, 2) for digit in (2, 5)]
    axes.set_yticks([tick for tick in between if low < tick < high], minor=True)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.set_ylabel("held-out loss (mean square)\nall users and items alike")
    axes.legend(frameon=False)


def _draw_distances(axes: Axes, curves: Curves) -> None:
    for name in (DEFERRED, SPARSE):
        # No distance at all, as at the start, has no place on a logarithmic axis.
        points = [(step, far) for step, far in zip(curves.steps, curves.distances(name), strict=True) if far > 0]
        if points:
            steps, distances = zip(*points, strict=True)
            axes.plot(steps, distances, color=COLOURS[name], linewidth=1.5)
            _label(axes, name, f"{name}: at most {max(distances):.1g}", points[-1], (-1, 9))
    axes.margins(y=0.25)
    axes.set_ylabel("distance to\ndense Adam's loss")
    axes.set_xlabel("step")


def _label(axes: Axes, name: str, text: str, point: tuple[float, float], away: tuple[int, int]) -> None:
    """Write next to a curve, in its colour; `away` are points to the right and up."""
    right, up = away
    axes.annotate(
        text,
        point,
        away,
        textcoords="offset points",
        color=COLOURS[name],
        ha="left" if right > 0 else "right",
        va="bottom" if up > 0 else "top",
    )

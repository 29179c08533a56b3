"""How a rule compares with another over the same seeds, and how sure that is."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np

from benchmarks.quality.tuning import Figure

RESAMPLES = 10_000


class Ratio(NamedTuple):
    """Of two means, with the 95% interval of a paired bootstrap over the seeds."""

    mean: float
    low: float
    high: float


def ratio(figure: Figure, to: Figure) -> Ratio:
    pairs = np.array([figure.values, to.values])
    chosen = np.random.default_rng(0).integers(pairs.shape[1], size=(RESAMPLES, pairs.shape[1]))
    ours, theirs = pairs[:, chosen].mean(2)
    low, high = np.quantile(ours / theirs, [0.025, 0.975])
    return Ratio(figure.mean / to.mean, float(low), float(high))


class Difference(NamedTuple):
    """The mean over pairs with one seed, with the 95% interval of Student's t."""

    mean: float
    low: float
    high: float
    largest: float  # of the pairs, without its sign

    def over(self, mean: float) -> Difference:
        """The same as a share of ``mean``."""
        return Difference(*(value / mean for value in self))


def difference(figure: Figure, to: Figure) -> Difference:
    pairs = Figure(tuple(a - b for a, b in zip(figure.values, to.values, strict=True)))
    around = student(len(pairs.values) - 1) * pairs.standard_error if len(pairs.values) > 1 else math.inf
    return Difference(pairs.mean, pairs.mean - around, pairs.mean + around, max(map(abs, pairs.values)))


@functools.cache
def student(freedom: int) -> float:
    """Between minus and plus this value lie 95% of Student's t with so many degrees of freedom."""
    # With t = tan(a) * sqrt(freedom), the density is that of a, cos(a)^(freedom - 1), on a finite interval.
    angles = np.linspace(0, math.pi / 2, 200_001)
    density = np.cos(angles) ** (freedom - 1)
    inside = np.cumsum((density[1:] + density[:-1]) / 2)
    angle = np.interp(0.95, inside / inside[-1], angles[1:])
    return math.sqrt(freedom) * math.tan(float(angle))

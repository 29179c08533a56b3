"""How a rule compares with another over the same seeds, and how sure that is."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from scipy.stats import t  # type: ignore[import-untyped]

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
    around = t.ppf(0.975, len(pairs.values) - 1) * pairs.standard_error if len(pairs.values) > 1 else math.inf
    return Difference(pairs.mean, pairs.mean - around, pairs.mean + around, max(map(abs, pairs.values)))

"""How a rule's mean compares with Adam's over the same seeds, and how sure that is."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks.quality.tuning import Figure

RESAMPLES = 10_000
LEAST = 0.99  # as good as Adam, up to 1%


@dataclass(frozen=True)
class Ratio:
    """Of two means, with the 95% interval of a paired bootstrap over the seeds."""

    mean: float
    low: float
    high: float

    @property
    def within_one_percent(self) -> str:
        """Of a figure that should be high: whether the whole interval is at or above 0.99, or below, or neither."""
        return "yes" if self.low >= LEAST else "no" if self.high < LEAST else "open"

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"within_one_percent": self.within_one_percent}


def ratio(figure: Figure, to: Figure) -> Ratio:
    pairs = np.array([figure.values, to.values])
    chosen = np.random.default_rng(0).integers(pairs.shape[1], size=(RESAMPLES, pairs.shape[1]))
    ours, theirs = pairs[:, chosen].mean(2)
    low, high = np.quantile(ours / theirs, [0.025, 0.975])
    return Ratio(figure.mean / to.mean, float(low), float(high))

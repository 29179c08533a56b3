"""How a step's time grows with each number of a case: rowstep, torch's SparseAdam, and the memory's traffic alone.

All three work on one table and one pair of moments, so that 10^8 rows fit. They are the ones that rowstep allocates, on
huge pages where the system has them, which torch's own are not.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks import cases
from benchmarks.cases import POOL, Case
from benchmarks.contenders import ROWSTEP, TORCH, check_close, give, stepper, touch_state, weights
from benchmarks.peers.measures import SHARE, free_bytes
from benchmarks.sparse import roofline
from benchmarks.timing import Contender, Measurement, measure, threads
from rowstep import SparseAdam
from rowstep._kernels.pointers import CACHE_LINE

ROWS, IDS, WIDTH, DUPLICATES, THREADS = "rows", "ids", "width", "duplicates", "threads"
LABELS = {
    ROWS: "rows of the table",
    IDS: "ids of a step",
    WIDTH: "width of a row",
    DUPLICATES: "occurrences of each id",
    THREADS: "threads",
}
FIELDS = {ROWS: "rows", IDS: "ids", WIDTH: "dim"}

COLD = 128e6  # bytes that are touched before a batch comes again, or else rows would stay in the cache
MOST_BATCHES = 150


class Curve(NamedTuple):
    """A case of which one number is varied: rows, ids, width, how often each id occurs, or threads."""

    axis: str
    label: str
    case: Case
    values: Sequence[int]


def measured(curve: Curve, counts: Sequence[int], repeats: int) -> Iterator[Measurement]:
    """A measurement per point and number of threads, of the kind `curve.axis` and with the point as its name."""
    if curve.axis == THREADS:
        counts = range(1, max(counts) + 1)
    for value in curve.values or (0,):
        change: dict[str, Any] = {FIELDS[curve.axis]: value} if curve.axis in FIELDS else {}
        case = dataclasses.replace(curve.case, **change)
        about = f"{curve.label}, {cases.short(value)} {LABELS[curve.axis]}" if value else curve.label
        if (need := 12 * case.weights) > SHARE * free_bytes():
            reason = f"would need {need / 1e9:.1f} GB"
            yield Measurement(curve.axis, str(value), about, 1, {}, dict.fromkeys((ROWSTEP, TORCH), reason))
            continue
        point = Point(case, value if curve.axis == DUPLICATES else 0)
        for count in counts:
            with threads(count):
                name = str(count if curve.axis == THREADS else value)
                yield measure(curve.axis, name, about, point.contenders(count), repeats)


class Point:
    """The contenders of one case, which share its table and moments, after one step of each that came out the same."""

    def __init__(self, case: Case, occurrences: int) -> None:
        if occurrences:
            self.gradients = _repeated(case, occurrences)
        else:
            self.gradients = cases.gradients(dataclasses.replace(case, batches=_batches(case)))
        self.ours: torch.optim.Optimizer = SparseAdam(cases.parameters(case))
        (self.table,) = weights(self.ours)
        self.theirs: torch.optim.Optimizer = torch.optim.SparseAdam([self.table])
        self._check(case)
        touch_state(self.ours)

    def contenders(self, count: int) -> list[Contender]:
        # Nobody comes right after another with the same batch: its rows would still be in the cache.
        ours, theirs, moved = (_beginning_at(third, self.gradients) for third in range(3))
        return [
            stepper(ROWSTEP, self.ours, ours),
            stepper(TORCH, self.theirs, theirs),
            roofline.contender(self.ours, moved, count),
        ]

    def _check(self, case: Case) -> None:
        """Our step; then the rows are put back, and torch takes its step from there."""
        (gradient,) = self.gradients[0]
        rows = gradient.coalesce().indices()[0]
        before = self.table.detach()[rows]
        give(self.ours, [gradient])
        self.ours.step()
        moments = {name: self.ours.state[self.table][name] for name in ("exp_avg", "exp_avg_sq")}
        shared = {"weights": self.table.detach(), **moments}
        ours = {name: tensor[rows] for name, tensor in shared.items()}
        for name, tensor in shared.items():
            tensor[rows] = before if name == "weights" else torch.zeros_like(before)
        self.theirs.state[self.table] = {"step": 0, **moments}
        self.theirs.step()
        for name, tensor in shared.items():
            check_close(f"{case.about}: {name}", ours[name], tensor[rows])


def _batches(case: Case) -> int:
    touched = 3 * case.ids * max(CACHE_LINE, 4 * case.dim)
    return min(MOST_BATCHES, max(POOL, math.ceil(COLD / touched)))


def _beginning_at(third: int, gradients: list[list[Tensor]]) -> list[list[Tensor]]:
    first = third * len(gradients) // 3
    return gradients[first:] + gradients[:first]


def _repeated(case: Case, occurrences: int) -> list[list[Tensor]]:
    """Gradients in which every row that occurs at all occurs so many times, in random order."""
    rng = np.random.default_rng(0)
    drawn = [rng.choice(case.rows, case.ids // occurrences, replace=False) for _ in range(POOL)]
    mixed = [torch.from_numpy(rng.permutation(ids.repeat(occurrences))) for ids in drawn]
    return [[cases.gradient(case, ids, each)] for ids, (each,) in zip(mixed, cases.values(case), strict=True)]

"""How a step's time grows with each number of a case: rowstep, torch's SparseAdam, and the memory's traffic alone.

All three work on one table and one pair of moments, so that 10^8 rows fit. They are the ones that rowstep allocates, on
huge pages where the system has them, which torch's own are not.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import cases
from benchmarks.cases import POOL, Case
from benchmarks.contenders import ROOFLINE, ROWSTEP, TORCH, check_close, give, stepper, touch_state, weights
from benchmarks.peers.groups import SHARE, free_bytes
from benchmarks.peers.sizes import DUPLICATES, IDS, LABELS, ROWS, THREADS, WIDTH, Curve
from benchmarks.sparse import roofline
from benchmarks.timing import Contender, Measurement, measure, threads
from rowstep import SparseAdam
from rowstep._kernels.memory import CACHE_LINE

FIELDS = {ROWS: "rows", IDS: "ids", WIDTH: "dim"}

COLD = 128e6  # bytes that are touched before a batch comes again, or else rows would stay in the cache
MOST_BATCHES = 150


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
            yield Measurement(curve.axis, str(value), about, 1, {}, dict.fromkeys((ROWSTEP, TORCH), reason), 0.0)
            continue
        point = Point(case, value if curve.axis == DUPLICATES else 0)
        for count in counts:
            with threads(count):
                name = str(count if curve.axis == THREADS else value)
                yield measure(curve.axis, name, about, point.contenders(count), repeats)


class Point:
    """The contenders of one case, which share its table and moments, after one step of each that came out the same."""

    def __init__(self, case: Case, occurrences: int) -> None:
        batches = [] if occurrences else cases.gradients(case, _batches(case))
        self.gradients = _repeated(case, occurrences) if occurrences else [batch[0] for batch in batches]
        self.ours: torch.optim.Optimizer = SparseAdam(cases.parameters(case))
        (self.table,) = weights(self.ours)
        self.theirs: torch.optim.Optimizer = torch.optim.SparseAdam([self.table])
        self._check(case)
        touch_state(self.ours)

    def contenders(self, count: int) -> list[Contender]:
        # Nobody comes right after another with the same batch: its rows would still be in the cache.
        ours, theirs, moved = (_beginning_at(third, self.gradients) for third in range(3))
        state = self.ours.state[self.table]
        tables = (self.table, state["exp_avg"], state["exp_avg_sq"])
        traffic = [roofline.traffic(gradient, tables, count) for gradient in moved]
        batch = traffic[0]

        def prepare(number: int) -> None:
            nonlocal batch
            batch = traffic[number % len(traffic)]

        roof = Contender(ROOFLINE, prepare, lambda: batch.move())
        return [
            stepper(ROWSTEP, self.ours, [[gradient] for gradient in ours]),
            stepper(TORCH, self.theirs, [[gradient] for gradient in theirs]),
            roof,
        ]

    def _check(self, case: Case) -> None:
        """Our step; then the rows are put back, and torch takes its step from there."""
        gradient = self.gradients[0]
        rows = gradient.coalesce().indices()[0]
        before = self.table.detach()[rows]
        give(self.ours, [gradient])
        self.ours.step()
        state = self.ours.state[self.table]
        shared = [self.table.detach(), state["exp_avg"], state["exp_avg_sq"]]
        ours = [tensor[rows] for tensor in shared]
        for tensor, was in zip(shared, (before, 0, 0), strict=True):
            tensor[rows] = was if isinstance(was, Tensor) else torch.zeros(len(rows), case.dim)
        self.theirs.state[self.table] = {"step": 0, "exp_avg": shared[1], "exp_avg_sq": shared[2]}
        self.theirs.step()
        for name, our, tensor in zip(("weights", "exp_avg", "exp_avg_sq"), ours, shared, strict=True):
            check_close(f"{case.about}: {name}", our, tensor[rows])


def _batches(case: Case) -> int:
    touched = 3 * case.ids * max(CACHE_LINE, 4 * case.dim)
    return min(MOST_BATCHES, max(POOL, math.ceil(COLD / touched)))


def _beginning_at(third: int, gradients: list[Tensor]) -> list[Tensor]:
    first = third * len(gradients) // 3
    return gradients[first:] + gradients[:first]


def _repeated(case: Case, occurrences: int) -> list[Tensor]:
    """Gradients in which every row that occurs at all occurs so many times, in random order."""
    rng = np.random.default_rng(0)
    values = [batch[0]._values() for batch in cases.gradients(case)]
    drawn = [rng.choice(case.rows, case.ids // occurrences, replace=False) for _ in range(POOL)]
    mixed = [torch.from_numpy(rng.permutation(ids.repeat(occurrences))) for ids in drawn]
    return [cases.gradient(case, *pair) for pair in zip(mixed, values, strict=True)]

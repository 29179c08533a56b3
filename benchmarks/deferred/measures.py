"""What is timed: steps with the catch-up before them, flushes, and both with more and more of the rows touched."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks import cases
from benchmarks.contenders import ADAM, TORCH, check_close, give, stepper, touch_state, weights
from benchmarks.deferred.sizes import Pooled
from benchmarks.timing import Contender, Measurement, measure, nothing, threads, warm_up
from rowstep import DeferredAdam, SparseAdam

DEFERRED, SPARSE, MADE_DENSE = "DeferredAdam", "rowstep SparseAdam", "torch Adam (dense) with gradient"

DENSE_ROUNDS = 3  # a dense step over 10 million rows takes a second, and hardly varies
FLUSHES = 8
STEPS_BETWEEN_FLUSHES = 20


@dataclass(frozen=True)
class BreakEven:
    """The share of rows touched at which DeferredAdam takes as long as another."""

    threads: int
    opponent: str
    share: float | None  # None if it is not among the shares measured


def against_sparse(pooled: Pooled, counts: Sequence[int], repeats: int) -> Iterator[Measurement]:
    case = pooled.case
    pool = cases.gradients(case, pooled.batches)
    ours = _deferred_stepper(DeferredAdam(cases.parameters(case)), pool)
    warm_up(ours, pooled.batches)
    lineup = [ours]
    # How long a row has waited is nothing to these two: they are spared the hundreds of steps.
    for name, kind in ((SPARSE, SparseAdam), (TORCH, torch.optim.SparseAdam)):
        optimizer = kind(cases.parameters(case))
        lineup.append(stepper(name, optimizer, pool))
        warm_up(lineup[-1], 1)
        touch_state(optimizer)
    for count in counts:
        with threads(count):
            yield measure("step", case.name, pooled.about, lineup, repeats)


def against_dense(pooled: Pooled, counts: Sequence[int], repeats: int) -> Iterator[Measurement]:
    lineup = _beside_dense(pooled, min(repeats, DENSE_ROUNDS))
    for count in counts:
        with threads(count):
            yield measure("step", pooled.case.name, pooled.about, lineup, repeats)


def shares(sizes: Sequence[Pooled], counts: Sequence[int], repeats: int) -> Iterator[tuple[float, Measurement]]:
    """Each with the share of rows that a step touches."""
    for pooled in sizes:
        case = pooled.case
        about = f"{cases.short(case.rows)} x {case.dim}, {case.share_touched:.0%} of the rows"
        lineup = _beside_dense(pooled, repeats)
        for count in counts:
            with threads(count):
                yield case.share_touched, measure("share", case.name, about, lineup, repeats)


def flush(pooled: Pooled, counts: Sequence[int], repeats: int) -> Iterator[Measurement]:
    """Every row is stale, and has waited for up to STEPS_BETWEEN_FLUSHES steps and one."""
    case = pooled.case
    ours, theirs, pool = _agreeing_pair(pooled)
    steps = _deferred_stepper(ours, pool)
    warm_up(steps, pooled.batches)
    no_row = [cases.gradient(case, torch.empty(0, dtype=torch.int64), torch.empty(0, case.dim))]

    def let_wait(_number: int) -> None:
        warm_up(steps, STEPS_BETWEEN_FLUSHES)
        give(ours, no_row)
        ours.step()

    lineup = [Contender(DEFERRED, let_wait, ours.flush), Contender(ADAM, nothing, theirs.step)]
    for count in counts:
        with threads(count):
            yield measure("flush", case.name, f"{cases.short(case.rows)} x {case.dim}", lineup, min(repeats, FLUSHES))


def break_evens(measured: Sequence[tuple[float, Measurement]]) -> list[BreakEven]:
    return [
        BreakEven(count, opponent, _where_equal([pair for pair in measured if pair[1].threads == count], opponent))
        for count in sorted({measurement.threads for _, measurement in measured})
        for opponent in (ADAM, MADE_DENSE)
    ]


def _where_equal(measured: Sequence[tuple[float, Measurement]], opponent: str) -> float | None:
    points = [(share, measurement.ratio(DEFERRED, opponent) or math.nan) for share, measurement in measured]
    for (low, below), (high, above) in itertools.pairwise(points):
        if below <= 1 < above:
            return low + (high - low) * math.log(below) / math.log(below / above)
    return None


def _deferred_stepper(optimizer: DeferredAdam, pool: Sequence[list[Tensor]]) -> Contender:
    """A step as training has it: rows are brought up to date before they are read, then stepped."""
    # Not by the number of the round: the next thread count goes on where this one ended, so that rows have waited.
    turn = itertools.cycle(pool)
    tables = weights(optimizer)
    ids: list[Tensor] = []

    def prepare(_number: int) -> None:
        gradients = next(turn)
        give(optimizer, gradients)
        ids[:] = (gradient._indices()[0] for gradient in gradients)

    def run() -> None:
        for table, rows in zip(tables, ids, strict=True):
            optimizer.catch_up(table, rows)
        optimizer.step()

    return Contender(DEFERRED, prepare, run)


def _beside_dense(pooled: Pooled, dense_rounds: int) -> list[Contender]:
    """DeferredAdam; dense Adam and the making of its gradient, as the backward pass does; and dense Adam alone."""
    ours, theirs, pool = _agreeing_pair(pooled)
    steps = _deferred_stepper(ours, pool)
    warm_up(steps, pooled.batches)
    (table,) = weights(theirs)
    gradient = pool[0][0]

    def prepare(number: int) -> None:
        nonlocal gradient
        gradient = pool[number % len(pool)][0]
        table.grad = None

    def run() -> None:
        table.grad = gradient.to_dense()
        theirs.step()

    # The last one finds the gradient that the one before it has made.
    return [
        steps,
        Contender(MADE_DENSE, prepare, run, at_most=dense_rounds),
        Contender(ADAM, nothing, theirs.step, at_most=dense_rounds),
    ]


def _agreeing_pair(pooled: Pooled) -> tuple[DeferredAdam, torch.optim.Adam, list[list[Tensor]]]:
    """DeferredAdam and dense Adam, which a few steps have led to the same weights, and the gradients."""
    case = pooled.case
    pool = cases.gradients(case, pooled.batches)
    ours, theirs = DeferredAdam(cases.parameters(case)), torch.optim.Adam(cases.parameters(case), fused=True)
    steps = _deferred_stepper(ours, pool)
    for gradients in pool[:3]:
        warm_up(steps, 1)
        give(theirs, [gradient.to_dense() for gradient in gradients])
        theirs.step()
    ours.flush()
    # The moments may differ in more digits: those of the most frequent rows are small sums of large terms.
    for p, q in zip(weights(ours), weights(theirs), strict=True):
        check_close(f"{case.name}: weights", p, q)
    return ours, theirs, pool

"""The suite `deferred`: rowstep.DeferredAdam against dense Adam, whose result it gives, and sparse optimizers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import cases
from benchmarks.cases import LONG, TINY_ZIPF, ZIPF, Case, short
from benchmarks.contenders import ADAM, TORCH, check_agreement, check_close, give, stepper, touch_state, weights
from benchmarks.report import Grid, threads, times
from benchmarks.suite import Part, Suite
from benchmarks.timing import Contender, Measurement, nothing
from rowstep import DeferredAdam, SparseAdam

DEFERRED, SPARSE, MADE_DENSE = "DeferredAdam", "rowstep SparseAdam", "torch Adam (dense) with gradient"

DENSE_ROUNDS = 3  # a dense step over 10 million rows takes a second, and hardly varies
FLUSHES = 8
STEPS_BETWEEN_FLUSHES = 20

OVER_SPARSE_ADAM = 2.5
VERSUS_TORCH = 3
VERSUS_DENSE = 30
FLUSH_OVER_DENSE_STEP = 3

TITLE = "One step and the catch-up before it, when all batches have come once"


class Sizes(NamedTuple):
    """DeferredAdam is warmed up for as many steps as a case has batches: six in turn would let no row wait longer."""

    sparse: Case  # against sparse optimizers
    dense: Case  # against dense Adam
    flush: Case
    shares: tuple[Case, ...]  # more and more of the rows are touched


def share_of(rows: int, dim: int, share: float, batches: int) -> Case:
    """Uniform ids that name so much of the table."""
    return Case(f"{share:.0%}-of-{short(rows)}", rows, dim, round(-math.log(1 - share) * rows), batches=batches)


FULL = Sizes(
    # With a Zipf batch of 65,536 ids, the rarest of a million rows comes every 220 steps.
    sparse=replace(ZIPF, batches=300),
    # A row of 10 million comes every 610 steps, by when its momentum has long ceased to act.
    dense=replace(LONG, batches=600),
    flush=replace(ZIPF, batches=100),
    shares=tuple(share_of(250_000, 64, share, 60) for share in (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5)),
)
QUICK = Sizes(
    sparse=replace(TINY_ZIPF, batches=30),
    dense=Case("uniform-50k", 50_000, 8, 512, batches=30),
    flush=replace(TINY_ZIPF, batches=30),
    shares=tuple(share_of(10_000, 8, share, 10) for share in (0.05, 0.3)),
)


class DeferredSuite(Suite):
    file = "deferred"

    @property
    def sizes(self) -> Sizes:
        return QUICK if self.quick else FULL

    def parts(self) -> Iterator[Part]:
        yield Part(self.sizes.sparse.name, self._against_sparse)
        yield Part(self.sizes.dense.name, self._against_dense)
        yield Part("flush", self._flush)
        yield Part("shares", self._shares)

    def _against_sparse(self) -> None:
        case = self.sizes.sparse
        optimizer, _, pool = agreeing_pair(case)
        lineup = [deferred_stepper(optimizer, pool)]
        lineup[0].warm_up(case.batches)
        # How long a row has waited is nothing to these two: they are spared the hundreds of steps.
        pair = SparseAdam(cases.parameters(case)), torch.optim.SparseAdam(cases.parameters(case))
        for name, each in zip((SPARSE, TORCH), pair, strict=True):
            lineup.append(stepper(name, each, pool))
            lineup[-1].warm_up()
            touch_state(each)
        check_agreement(case.name, *pair)
        for measured in self.measure("step", case, lineup):
            if measured.threads == 1:
                what = "step and catch-up"
                self.expect_at_most(f"{what} over SparseAdam", measured, DEFERRED, SPARSE, OVER_SPARSE_ADAM)
                self.expect_faster(f"{what} vs torch SparseAdam", measured, DEFERRED, TORCH, VERSUS_TORCH)

    def _against_dense(self) -> None:
        case = self.sizes.dense
        lineup = beside_dense(case, min(self.repeats, DENSE_ROUNDS))
        for measured in self.measure("step", case, lineup):
            self.expect_faster("step and catch-up vs dense Adam", measured, DEFERRED, MADE_DENSE, VERSUS_DENSE)

    def _shares(self) -> None:
        points: list[tuple[float, Measurement]] = []
        for case in self.sizes.shares:
            lineup = beside_dense(case, self.repeats)
            about = f"{case.size}, {case.share_touched:.0%} of the rows"
            points += [(case.share_touched, each) for each in self.measure("share", case, lineup, about)]
        self.findings["break_even"] = break_evens(points)

    def _flush(self) -> None:
        """Every row is stale, and has waited for up to STEPS_BETWEEN_FLUSHES steps and one."""
        case = self.sizes.flush
        ours, theirs, pool = agreeing_pair(case)
        steps = deferred_stepper(ours, pool)
        steps.warm_up(case.batches)
        no_row = [cases.gradient(case, torch.empty(0, dtype=torch.int64), torch.empty(0, case.dim))]

        def let_wait(_number: int) -> None:
            steps.warm_up(STEPS_BETWEEN_FLUSHES)
            give(ours, no_row)
            ours.step()

        lineup = [Contender(DEFERRED, let_wait, ours.flush), Contender(ADAM, nothing, theirs.step)]
        for measured in self.measure("flush", case, lineup, case.size, min(self.repeats, FLUSHES)):
            self.expect_at_most("flush over a dense step", measured, DEFERRED, ADAM, FLUSH_OVER_DENSE_STEP)

    def tables(self) -> Iterator[Grid | str]:
        measured = self.of_kind("step", "share")
        if sparse := [each for each in measured if TORCH in each.timings]:
            ratios = {"Deferred/\nSparse": (DEFERRED, SPARSE), "torch Sparse/\nDeferred": (TORCH, DEFERRED)}
            yield times(TITLE, sparse, (DEFERRED, SPARSE, TORCH), ratios)
        if dense := [each for each in measured if ADAM in each.timings]:
            ratios = {"Adam/\nDeferred": (ADAM, DEFERRED), "with gradient/\nDeferred": (MADE_DENSE, DEFERRED)}
            yield times(TITLE, dense, (DEFERRED, ADAM, MADE_DENSE), ratios)
        for found in self.findings.get("break_even", ()):
            share = found["share"]
            where = "at no share measured" if share is None else f"with {share:.0%} of the rows touched"
            yield f"{threads(found['threads'])}: DeferredAdam takes as long as {found['opponent']} {where}."
        if flushes := self.of_kind("flush"):
            ratio = {"flush/\nAdam": (DEFERRED, ADAM)}
            yield times("Flush of all rows, and a dense step", flushes, (DEFERRED, ADAM), ratio)


def break_evens(points: Sequence[tuple[float, Measurement]]) -> list[dict[str, Any]]:
    """The share of rows touched at which DeferredAdam takes as long as another; None if none measured is."""
    return [
        {"threads": count, "opponent": opponent, "share": _where_equal(points, count, opponent)}
        for count in sorted({measured.threads for _, measured in points})
        for opponent in (ADAM, MADE_DENSE)
    ]


def _where_equal(points: Sequence[tuple[float, Measurement]], count: int, opponent: str) -> float | None:
    ratios = [(share, each.ratio(DEFERRED, opponent) or math.nan) for share, each in points if each.threads == count]
    for (low, below), (high, above) in itertools.pairwise(ratios):
        if below <= 1 < above:
            return low + (high - low) * math.log(below) / math.log(below / above)
    return None


def deferred_stepper(optimizer: DeferredAdam, pool: Sequence[list[Tensor]]) -> Contender:
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


def beside_dense(case: Case, dense_rounds: int) -> list[Contender]:
    """DeferredAdam; dense Adam and the making of its gradient, as the backward pass does; and dense Adam alone."""
    ours, theirs, pool = agreeing_pair(case)
    steps = deferred_stepper(ours, pool)
    steps.warm_up(case.batches)
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
    made, alone = Contender(MADE_DENSE, prepare, run, dense_rounds), Contender(ADAM, nothing, theirs.step, dense_rounds)
    return [steps, made, alone]


def agreeing_pair(case: Case) -> tuple[DeferredAdam, torch.optim.Adam, list[list[Tensor]]]:
    """DeferredAdam and dense Adam, which a few steps have led to the same weights, and the gradients."""
    pool = cases.gradients(case)
    ours, theirs = DeferredAdam(cases.parameters(case)), torch.optim.Adam(cases.parameters(case), fused=True)
    steps = deferred_stepper(ours, pool)
    for gradients in pool[:3]:
        steps.warm_up()
        give(theirs, [gradient.to_dense() for gradient in gradients])
        theirs.step()
    ours.flush()
    # The moments may differ in more digits: those of the most frequent rows are small sums of large terms.
    for p, q in zip(weights(ours), weights(theirs), strict=True):
        check_close(f"{case.name}: weights", p, q)
    return ours, theirs, pool

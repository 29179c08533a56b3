"""The suite `deferred`: rowstep.DeferredAdam against dense Adam, whose result it gives, and sparse optimizers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks import cases
from benchmarks.cases import LONG, TINY_ZIPF, ZIPF, Case
from benchmarks.contenders import (
    ADAM,
    TORCH,
    check_agreement,
    check_close,
    give,
    looper,
    stepper,
    touch_state,
    weights,
)
from benchmarks.report import LOOP, Grid, times
from benchmarks.suite import Part, Suite
from benchmarks.timing import Contender, nothing
from rowstep import DeferredAdam, SparseAdam

DEFERRED, SPARSE = "DeferredAdam", "rowstep SparseAdam"

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


FULL = Sizes(
    # With a Zipf batch of 65,536 ids, the rarest of a million rows comes every 220 steps.
    sparse=replace(ZIPF, batches=300),
    # A row of 10 million comes every 610 steps, by when its momentum has long ceased to act.
    dense=replace(LONG, batches=600),
    flush=replace(ZIPF, batches=100),
)
QUICK = Sizes(
    sparse=replace(TINY_ZIPF, batches=30),
    dense=Case("uniform-50k", 50_000, 8, 512, batches=30),
    flush=replace(TINY_ZIPF, batches=30),
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

    def _against_sparse(self) -> None:
        case = self.sizes.sparse
        optimizer, _, pool = agreeing_pair(case)
        lineup, loops = [deferred_stepper(optimizer, pool)], [looper(DEFERRED, optimizer, pool)]
        lineup[0].warm_up(case.batches)
        # How long a row has waited is nothing to these two: they are spared the hundreds of steps.
        pair = SparseAdam(cases.parameters(case)), torch.optim.SparseAdam(cases.parameters(case))
        for name, each in zip((SPARSE, TORCH), pair, strict=True):
            lineup.append(stepper(name, each, pool))
            lineup[-1].warm_up()
            touch_state(each)
            loops.append(looper(name, each, pool))
        check_agreement(case.name, *pair)
        for measured in self.measure("step", case, lineup):
            if measured.threads == 1:
                what = "step and catch-up"
                self.expect_at_most(f"{what} over SparseAdam", measured, DEFERRED, SPARSE, OVER_SPARSE_ADAM)
                self.expect_faster(f"{what} vs torch SparseAdam", measured, DEFERRED, TORCH, VERSUS_TORCH)
        for _ in self.measure("loop", case, loops):
            pass

    def _against_dense(self) -> None:
        case = self.sizes.dense
        steps, loops = beside_dense(case, min(self.repeats, DENSE_ROUNDS))
        for _ in self.measure("step", case, steps):
            pass
        for measured in self.measure("loop", case, loops):
            self.expect_faster("whole loop vs dense Adam", measured, DEFERRED, ADAM, VERSUS_DENSE)

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
        for kind, title in (("step", TITLE), ("loop", LOOP)):
            measured = self.of_kind(kind)
            if sparse := [each for each in measured if TORCH in each.timings]:
                ratios = {"Deferred/\nSparse": (DEFERRED, SPARSE), "torch Sparse/\nDeferred": (TORCH, DEFERRED)}
                yield times(title, sparse, (DEFERRED, SPARSE, TORCH), ratios)
            if dense := [each for each in measured if ADAM in each.timings]:
                yield times(title, dense, (DEFERRED, ADAM), {"Adam/\nDeferred": (ADAM, DEFERRED)})
        if flushes := self.of_kind("flush"):
            ratio = {"flush/\nAdam": (DEFERRED, ADAM)}
            yield times("Flush of all rows, and a dense step", flushes, (DEFERRED, ADAM), ratio)


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


def beside_dense(case: Case, dense_rounds: int | None = None) -> tuple[list[Contender], list[Contender]]:
    """Steps of DeferredAdam and of dense Adam, which is given a gradient; whole loops, in which each makes its own."""
    ours, theirs, pool = agreeing_pair(case)
    steps = deferred_stepper(ours, pool)
    steps.warm_up(case.batches)
    touch_state(theirs)
    dense = looper(ADAM, theirs, pool, sparse=False, at_most=dense_rounds)
    return [steps, Contender(ADAM, nothing, theirs.step, dense_rounds)], [looper(DEFERRED, ours, pool), dense]


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

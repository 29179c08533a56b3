"""What DeferredAdam is to reach. Only what was measured is listed."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import cases
from benchmarks.bars import Bar, faster, not_much_slower
from benchmarks.contenders import ADAM, TORCH
from benchmarks.deferred.accuracy import LARGEST_DIFFERENCE, Accuracy
from benchmarks.deferred.measures import DEFERRED, MADE_DENSE, SPARSE
from benchmarks.timing import Measurement

OVER_SPARSE_ADAM = 2.5
VERSUS_TORCH = 3
VERSUS_DENSE = 30
FLUSH_OVER_DENSE_STEP = 3


def accurate(found: Accuracy) -> Iterator[Bar]:
    yield Bar(f"float64, largest difference from dense Adam: {found.about}", LARGEST_DIFFERENCE, found.float64, "")
    distance = found.float32 / found.torch_float32
    yield Bar(f"float32, distance to the float64 run over torch's: {found.about}", 1, distance, "x")


def timed(measured: Measurement) -> Iterator[Bar]:
    if measured.kind == "step" and measured.name == cases.ZIPF.name and measured.threads == 1:
        yield from not_much_slower("step and catch-up over SparseAdam", measured, DEFERRED, SPARSE, OVER_SPARSE_ADAM)
        yield from faster("step and catch-up vs torch SparseAdam", measured, DEFERRED, TORCH, VERSUS_TORCH)
    if measured.kind == "step":
        yield from faster("step and catch-up vs dense Adam", measured, DEFERRED, MADE_DENSE, VERSUS_DENSE)
    if measured.kind == "flush":
        yield from not_much_slower("flush over a dense step", measured, DEFERRED, ADAM, FLUSH_OVER_DENSE_STEP)

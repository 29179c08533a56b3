"""The tables and sentences of the suite `deferred`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from benchmarks.contenders import ADAM, TORCH
from benchmarks.deferred.accuracy import Accuracy
from benchmarks.deferred.factorisation import DEFERRED as DEFERRED_CURVE
from benchmarks.deferred.factorisation import SPARSE as SPARSE_CURVE
from benchmarks.deferred.factorisation import Curves
from benchmarks.deferred.measures import DEFERRED, MADE_DENSE, SPARSE, BreakEven
from benchmarks.report import times
from benchmarks.timing import Measurement

if TYPE_CHECKING:
    from rich.table import Table

_TITLE = "One step and the catch-up before it, when all batches have come once"
_OVER_DENSE = {"Adam/\nDeferred": (ADAM, DEFERRED), "with gradient/\nDeferred": (MADE_DENSE, DEFERRED)}


def steps(measurements: Sequence[Measurement]) -> Iterator[Table]:
    """One table for the sparse opponents and one for the dense."""
    over_sparse = {"Deferred/\nSparse": (DEFERRED, SPARSE), "torch Sparse/\nDeferred": (TORCH, DEFERRED)}
    if sparse := [measured for measured in measurements if TORCH in measured.timings]:
        yield times(_TITLE, sparse, (DEFERRED, SPARSE, TORCH), over_sparse)
    if dense := [measured for measured in measurements if ADAM in measured.timings]:
        yield times(_TITLE, dense, (DEFERRED, ADAM, MADE_DENSE), _OVER_DENSE)


def flushes(measurements: Sequence[Measurement]) -> Table:
    ratios = {"flush/\nAdam": (DEFERRED, ADAM)}
    return times("Flush of all rows, and a dense step", measurements, (DEFERRED, ADAM), ratios)


def break_even(found: BreakEven) -> str:
    """A sentence about the table before it."""
    where = "at no share measured" if found.share is None else f"with {found.share:.0%} of the rows touched"
    return f"{found.threads} thread{'s' * (found.threads > 1)}: DeferredAdam takes as long as {found.opponent} {where}."


def accuracy(found: Accuracy) -> str:
    return (
        f"{found.about}: in float64 at most {found.float64:.1e} from dense Adam; in float32 {found.float32:.1e} (rms) "
        f"from the float64 run, dense Adam in float32 {found.torch_float32:.1e}."
    )


def curves(found: Curves) -> str:
    ours, sparse = (max(found.distances(name)) for name in (DEFERRED_CURVE, SPARSE_CURVE))
    return (
        f"{found.about}: the held-out losses of DeferredAdam and dense Adam differ by at most {ours:.1e}, "
        f"those of SparseAdam and dense Adam by up to {sparse:.1e}."
    )

"""Whether contestants compute the same; nothing is timed before that.

Every rule is compared after its first step, which has a simple formula. Those that follow SparseAdam's rule are then
compared with rowstep after STEPS of them, moments included. Gradients are multiples of 1/64, so sums of duplicates are
exact in any order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from benchmarks.contenders import DisagreementError
from benchmarks.peers.catalogue import Peer, Rule
from benchmarks.peers.data import Data
from benchmarks.peers.process import Process

STEPS = 3
SAMPLE = 20_000  # rows of a table that are compared, at most
RTOL, ATOL = 1e-5, 1e-7
RTOL_OF_MOMENTS = 1e-4  # 1 - beta2 is off by 5e-5 in packages that take beta2 as a float32

WORDS = {"weights": "weights", "first": "first moments", "second": "second moments"}

Number = TypeVar("Number", bound=np.generic)
Floats: TypeAlias = NDArray[np.float32]
State: TypeAlias = Mapping[str, Floats]


def first_move(peer: Peer, gradient: Floats) -> Floats:
    """What the first step does to the rows that have a gradient, by its formula.

    lr is 0.001, and eps small beside the gradient. Adam divides the gradient by the root of its own square, and Adagrad
    does no other in its first step. Both rules with one number per row divide by the root of the row's mean square.
    """
    if peer.rule in (Rule.ROW, Rule.ROW_ADAGRAD):
        squares = np.square(gradient, dtype=np.float64)
        moment = squares.mean(1, keepdims=True)
        return np.asarray(-1e-3 * gradient / np.sqrt(np.where(moment > 0, moment, 1)), np.float32)
    size = 1e-3 * _correction(1 + peer.ahead) / _correction(1)
    return np.asarray(np.sign(gradient) * -size, np.float32)


def _correction(step: int) -> float:
    return math.sqrt(1 - 0.999**step) / (1 - 0.9**step)


@dataclass
class Agreement:
    """Checks the contestants of one case, one after the other; rowstep, the first, is what others are held to."""

    data: Data
    models: dict[int, State] = field(default_factory=dict)

    def check(self, worker: Process) -> None:
        """Take the first steps with it, and compare. Raises DisagreementError."""
        tables = sorted({0, self.data.tables - 1})
        worker.turn(steps=1)
        for table in tables:
            self._check_first(worker, table)
        if worker.peer.rule is Rule.LAZY:
            worker.turn(steps=STEPS - 1)
            for table in tables:
                self._check_against_model(worker, table)

    def _check_first(self, worker: Process, table: int) -> None:
        rows, gradient = self.data.summed(0, table)
        rows, move = sample(rows), sample(first_move(worker.peer, gradient))
        after = worker.state(table, rows)["weights"]
        compare(worker.peer, "weights after one step", after, self.data.weights_of(rows) + move)
        others = np.setdiff1d(np.arange(min(self.data.rows, SAMPLE)), self.data.ids[0, table])
        if len(others):
            found = worker.state(table, others)["weights"]
            compare(worker.peer, "rows without a gradient", found, self.data.weights_of(others))

    def _check_against_model(self, worker: Process, table: int) -> None:
        rows = sample(np.unique(self.data.ids[:STEPS, table]))
        found = worker.state(table, rows)
        model = self.models.setdefault(table, found)
        compared = model.keys() & found.keys() - ({"weights"} if worker.peer.ahead else set())
        for name in sorted(compared):
            rtol = RTOL if name == "weights" else RTOL_OF_MOMENTS
            compare(worker.peer, f"{WORDS[name]} after {STEPS} steps", found[name], model[name], rtol)


def sample(rows: NDArray[Number]) -> NDArray[Number]:
    """At most SAMPLE of them, evenly spread."""
    return rows[:: -(-len(rows) // SAMPLE)]


def compare(peer: Peer, what: str, found: Floats, expected: Floats, rtol: float = RTOL) -> None:
    # NaN is no agreement, so the question is what is close, not what is not.
    if found.shape != expected.shape or not np.allclose(found, expected, rtol=rtol, atol=ATOL):
        off = np.abs(found - expected).max() if found.shape == expected.shape else np.nan
        raise DisagreementError(f"{peer.name}: {what} differ by up to {off:.2e}; its times cannot be compared")

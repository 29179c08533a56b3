"""The floor under a sparse step: a kernel that moves the step's bytes and does nothing else.

Every occurrence's gradient is read once, and p, m, v of every distinct row are read and written once, rows ascending,
as the step itself must. One number of each cache line is enough to make the whole line travel. Sorting is done
beforehand and not timed. It works on rowstep's own tensors, so both meet the same pages, huge or not, and it adds zero,
so their values stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import torch
from numba import prange, types
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.contenders import ROOFLINE, weights
from benchmarks.timing import Contender
from rowstep._kernels.pointers import CACHE_LINE, pointer, prefetch

address_as: Any = pointer  # Numba's stubs do not know what an intrinsic takes
AHEAD = 8  # occurrences between a prefetch and its use; 4 to 32 measured alike


@dataclass(frozen=True)
class Traffic:
    """The bytes of one table's step: where they are, and in which order they are visited."""

    values: Tensor  # (occurrences, dim), the gradient
    tables: tuple[Tensor, Tensor, Tensor]  # p, m, v: (rows, dim)
    rows: NDArray[np.int64]  # (occurrences,) ascending
    order: NDArray[np.int64]  # (occurrences,) where in `values` each of them is
    parts: NDArray[np.int64]  # (threads + 1,) bounds in `rows`; no row is in two parts

    def move(self) -> None:
        g, p, m, v = (tensor.data_ptr() for tensor in (self.values, *self.tables))
        dim, zero = self.values.shape[1], np.float32(0)
        if len(self.parts) == 2:
            _move_one(g, p, m, v, self.rows, self.order, 0, len(self.rows), dim, zero)
        else:
            _move_all(g, p, m, v, self.rows, self.order, self.parts, dim, zero)


def traffic(gradient: Tensor, tables: tuple[Tensor, Tensor, Tensor], threads: int) -> Traffic:
    ids = gradient._indices()[0].numpy()
    order = np.argsort(ids, kind="stable")
    rows = ids[order]
    parts = np.linspace(0, len(rows), threads + 1).astype(np.int64)
    parts[1:-1] = np.searchsorted(rows, rows[parts[1:-1]])
    return Traffic(gradient._values(), tables, rows, order, parts)


def contender(optimizer: torch.optim.Optimizer, gradients: Sequence[Sequence[Tensor]], threads: int) -> Contender:
    """Moves the bytes of the optimizer's steps on these gradients, in turn."""
    state = [(p, *(optimizer.state[p][key] for key in ("exp_avg", "exp_avg_sq"))) for p in weights(optimizer)]
    pool = [[traffic(*pair, threads) for pair in zip(batch, state, strict=True)] for batch in gradients]
    batch = pool[0]

    def prepare(number: int) -> None:
        nonlocal batch
        batch = pool[number % len(pool)]

    def run() -> None:
        for table in batch:
            table.move()

    return Contender(ROOFLINE, prepare, run)


def _move_part(
    g: int, p: int, m: int, v: int, rows: Any, order: Any, here: int, end: int, dim: int, zero: float
) -> None:
    width = 4 * dim
    while here < end:
        row = rows[here]
        seen = zero
        while here < end and rows[here] == row:
            soon = here + AHEAD
            if soon < end:
                prefetch(g + order[soon] * width, width)  # type: ignore[call-arg]
                if rows[soon] != rows[soon - 1]:
                    for table in (p, m, v):
                        prefetch(table + rows[soon] * width, width)
            gradient = address_as(g + order[here] * width, types.float32)
            for i in range(0, dim, CACHE_LINE // 4):
                seen += gradient[i]
            here += 1
        for table in (p, m, v):
            weights = address_as(table + row * width, types.float32)
            for i in range(0, dim, CACHE_LINE // 4):
                weights[i] += zero * seen


def _move_parts(g: int, p: int, m: int, v: int, rows: Any, order: Any, parts: Any, dim: int, zero: float) -> None:
    for part in prange(parts.size - 1):
        _move_one(g, p, m, v, rows, order, parts[part], parts[part + 1], dim, zero)


_move_one = numba.njit(_move_part, cache=True, error_model="numpy")
_move_all = numba.njit(_move_parts, cache=True, error_model="numpy", parallel=True)

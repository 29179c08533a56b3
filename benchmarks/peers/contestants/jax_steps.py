"""Lazy Adam in JAX: one jitted function per step, with donated buffers that `.at[].add` updates in place."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax  # type: ignore[import-not-found]
import jax.numpy as jnp  # type: ignore[import-not-found]
import numpy as np
from numpy.typing import NDArray

from benchmarks.peers.data import Data

BETA1, BETA2, EPS = 0.9, 0.999, 1e-8


def _step_table(table: tuple[Any, Any, Any], ids: Any, values: Any, size: Any) -> tuple[Any, Any, Any]:
    p, m, v = table
    # Shapes are static under jit: as many places as ids, the spare ones beyond the table, where "drop" ignores them.
    rows, places = jnp.unique(ids, size=len(ids), fill_value=len(p), return_inverse=True)
    summed = jnp.zeros_like(values).at[places].add(values)
    m_before, v_before = (moment.at[rows].get(mode="clip", indices_are_sorted=True) for moment in (m, v))
    m_move, v_move = (summed - m_before) * (1 - BETA1), (summed * summed - v_before) * (1 - BETA2)
    p_move = -size * (m_before + m_move) / (jnp.sqrt(v_before + v_move) + EPS)
    add = partial(_add, rows=rows)
    return add(p, p_move), add(m, m_move), add(v, v_move)


def _add(table: Any, move: Any, rows: Any) -> Any:
    return table.at[rows].add(move, mode="drop", indices_are_sorted=True, unique_indices=True)


def _step(tables: Any, ids: Any, values: Any, size: Any) -> Any:
    return [_step_table(table, rows, gradient, size) for table, rows, gradient in zip(tables, ids, values, strict=True)]


class LazyAdam:
    def __init__(self, data: Data) -> None:
        self.step = jax.jit(_step, donate_argnums=0)
        shape = (data.rows, data.dim)
        self.tables = [(jnp.array(data.weights()), jnp.zeros(shape), jnp.zeros(shape)) for _ in data.ids[0]]
        self.ids = [[jnp.array(ids, jnp.int32) for ids in batch] for batch in data.ids]
        self.values = [[jnp.array(values) for values in batch] for batch in data.values]
        self.number = self.steps = 0

    def prepare(self, number: int) -> None:
        self.number = number % len(self.ids)
        self.steps += 1

    def run(self) -> None:
        size = 1e-3 * math.sqrt(1 - BETA2**self.steps) / (1 - BETA1**self.steps)
        self.tables = self.step(self.tables, self.ids[self.number], self.values[self.number], size)
        jax.block_until_ready(self.tables)

    def state(self, table: int, rows: NDArray[np.int64]) -> dict[str, NDArray[np.float32]]:
        names = ("weights", "first", "second")
        return {name: np.asarray(array[rows]) for name, array in zip(names, self.tables[table], strict=True)}

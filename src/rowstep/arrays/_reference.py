"""The specification: the update in plain NumPy, in the order of the equations, for any strides and byte order."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .._rules import adam
from .._rules.adam import Scalars
from ._checks import FloatArray

# Elements at a time: four arrays of them and as many temporaries fit in a cache of 1 MB.
_BLOCK = 8192


def updated(p: FloatArray, m: FloatArray, v: FloatArray, g: FloatArray, scalars: Scalars) -> tuple[FloatArray, ...]:
    """The rule, as torch.optim.Adam has it, for float64 arrays: the new p, m and v."""
    return adam.update(
        p, m, v, None, g,
        1 - scalars.beta1, scalars.beta2, 1 - scalars.beta2, scalars.eps, scalars.step_size,
        None, scalars.shrink, scalars.decay, True,
        np.sqrt, np.maximum,
    )[:3]  # fmt: skip


def step(p: FloatArray, m: FloatArray, v: FloatArray, g: FloatArray, scalars: Scalars) -> None:
    """Step every element of ``p``, in place."""
    blocks = np.nditer(
        [p, m, v, g],
        flags=["external_loop", "buffered", "zerosize_ok"],
        op_flags=[["readwrite"], ["readwrite"], ["readwrite"], ["readonly"]],
        op_dtypes=[np.float64] * 4,
        casting="same_kind",
        buffersize=_BLOCK,
    )
    with blocks, np.errstate(all="ignore"):
        for p_block, m_block, v_block, g_block in blocks:
            p_block[...], m_block[...], v_block[...] = updated(p_block, m_block, v_block, g_block, scalars)


def step_rows(
    p: FloatArray, m: FloatArray, v: FloatArray, rows: NDArray[np.int64], g: FloatArray, scalars: Scalars
) -> None:
    """Step the rows of ``p`` that ``rows`` names, in place. Duplicates are added in order of occurrence."""
    distinct, position = np.unique(rows, return_inverse=True)
    with np.errstate(all="ignore"):
        total = np.zeros((len(distinct), *p.shape[1:]))
        np.add.at(total, position, g.astype(np.float64))
        p_old, m_old, v_old = (array[distinct].astype(np.float64) for array in (p, m, v))
        p[distinct], m[distinct], v[distinct] = updated(p_old, m_old, v_old, total, scalars)

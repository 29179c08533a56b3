"""Call the CPU kernels, which Numba compiles at first use and caches. Operands are float32 or float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._kernels import update as kernels
from .._kernels import walk
from .._kernels.pool import numba_threads
from .._kernels.workspace import PARALLEL_FROM_BYTES, shared_work, workspace
from .._rules.adam import Scalars
from . import _reference
from ._checks import FloatArray

# Gradient numbers widened at a time: 8 KB, so that they stay in the first-level cache beside what is updated.
_BLOCK = 1024

# How a kernel takes an operand. Any: NumPy's stubs know "contig" by the name "config".
_READ: Any = ["readonly", "contig", "aligned", "nbo"]
_WRITE: Any = ["readwrite", "contig", "aligned", "nbo"]


def step(p: FloatArray, m: FloatArray, v: FloatArray, g: FloatArray, scalars: Scalars) -> None:
    """Step every element of ``p``, in place."""
    # Arrays that lie in memory in the same order are one block, without a copy. Others pass through NumPy's buffers,
    # 8192 elements at a time.
    blocks = np.nditer(
        [p, m, v, g],
        flags=["external_loop", "buffered", "grow_inner", "zerosize_ok"],
        op_flags=[_WRITE, _WRITE, _WRITE, _READ],
    )
    with blocks:
        for block in blocks:
            threads = _threads_for(block[3])
            totals, numbers = workspace.totals(threads, _BLOCK, np.float64), _numbers(scalars)
            kernels.step(threads, totals, *block, *numbers, scalars.shrink, scalars.decay)


def step_rows(
    p: FloatArray, m: FloatArray, v: FloatArray, rows: NDArray[np.int64], g: FloatArray, scalars: Scalars
) -> None:
    """Step the rows of ``p`` that ``rows`` names, in place. Duplicates are added in order of occurrence."""
    if not (p.flags.c_contiguous and p.flags.aligned and p.dtype.isnative):
        _reference.step_rows(p, m, v, rows, g, scalars)
        return
    columns = math.prod(p.shape[1:])
    g = _addressable(g.reshape(len(rows), columns))
    threads = _threads_for(g)
    job = np.zeros(walk.JOB_WORDS, np.int64)
    bits = (len(rows) - 1).bit_length(), (len(p) - 1).bit_length()
    job[:8] = rows.ctypes.data, len(rows), len(p), g.ctypes.data, g.strides[0], columns, *bits
    job[kernels.P_AT : kernels.V_AT + 1] = p.ctypes.data, m.ctypes.data, v.ctypes.data
    job[kernels.SCALARS :].view(np.float64)[:6] = *_numbers(scalars), scalars.shrink or 0, scalars.decay or 0
    pieces, keys = shared_work(job, threads, len(rows))
    kernels.update(
        threads, workspace.totals(threads, columns, np.float64), np.empty(threads, np.int64), job, pieces,
        keys.at, keys.spare_at,
        *(np.empty(0, array.dtype) for array in (p, m, v, g)),  # how to read their addresses
        True,  # a first moment
        None, None,  # a second moment per row; amsgrad's maximum
        None, None, None,  # counts of each row's steps; notes beside each row; maximize
        None if scalars.shrink is None else True,
        None if scalars.decay is None else True,
        True,  # torch.optim.Adam's rule
        None, None, None,  # skip rows that are not finite; round moments at random; and weights
    )  # fmt: skip


def _numbers(scalars: Scalars) -> tuple[float, float, float, float]:
    return scalars.beta1, scalars.beta2, scalars.eps, scalars.step_size


def _threads_for(grad: FloatArray) -> int:
    return 1 if grad.nbytes < PARALLEL_FROM_BYTES else numba_threads()


def _addressable(g: FloatArray) -> FloatArray:
    if g.strides[1] == g.itemsize and g.flags.aligned and g.dtype.isnative:
        return g
    return np.array(g, g.dtype.newbyteorder("="), order="C")

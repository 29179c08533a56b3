"""The CPU kernels, compiled by Numba at first use and cached: the host's side of them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._kernels import adam, dense
from .._kernels.launch import PARALLEL_FROM_BYTES, workspace
from .._kernels.parallel import launch, numba_threads
from .._rule import Rule
from . import _reference
from ._operands import FloatArray

# Gradient numbers widened at a time: 8 KB, so that they stay in the first-level cache beside what is updated.
_BLOCK = 1024

# How a kernel takes an operand. Any: NumPy's stubs know "contig" by the name "config".
_READ: Any = ["readonly", "contig", "aligned", "nbo"]
_WRITE: Any = ["readwrite", "contig", "aligned", "nbo"]


def step(p: FloatArray, m: FloatArray, v: FloatArray, g: FloatArray, rule: Rule) -> None:
    """Step every element of ``p``, in place."""
    # Where all four lie in memory in the same order there is one block, the arrays themselves. What a kernel cannot
    # read as it lies, NumPy brings through its buffers, 8192 elements at a time.
    blocks = np.nditer(
        [p, m, v, g],
        flags=["external_loop", "buffered", "grow_inner", "zerosize_ok"],
        op_flags=[_WRITE, _WRITE, _WRITE, _READ],
    )
    with blocks:
        for block in blocks:
            threads = _threads_for(block[3])
            scalars = (rule.beta1, rule.beta2, rule.eps, rule.step_size, rule.shrink, rule.decay)
            arguments = (workspace.totals(threads, _BLOCK, np.float64), *map(_bits, block), *scalars)
            if threads == 1:
                dense.step_part(0, *arguments)
            else:
                launch(dense.step_parallel, threads, *arguments)


def step_rows(p: FloatArray, m: FloatArray, v: FloatArray, rows: NDArray[np.int64], g: FloatArray, rule: Rule) -> None:
    """Step the rows of ``p`` that ``rows`` names, in place. Duplicates are added in order of occurrence."""
    if not (p.flags.c_contiguous and p.flags.aligned and p.dtype.isnative):
        _reference.step_rows(p, m, v, rows, g, rule)
        return
    columns = math.prod(p.shape[1:])
    g = _addressable(g.reshape(len(rows), columns))
    threads = _threads_for(g)
    bounds = workspace.bounds(threads)
    arguments = (
        workspace.totals(threads, columns, np.float64),
        bounds,
        *workspace.grouping(rows.ctypes.data, len(rows), len(p), threads),
        p.ctypes.data,
        m.ctypes.data,
        v.ctypes.data,
        None,  # amsgrad's maximum
        None,  # counts of each row's steps
        g.ctypes.data,
        g.strides[0],
        _like(p),
        _like(m),
        _like(g),
        columns,
        rule.beta1,
        rule.beta2,
        rule.eps,
        rule.step_size,
        None,  # maximize
        rule.shrink,
        rule.decay,
        True,  # torch.optim.Adam's rule
        None,  # rows skipped that are not finite
    )
    if threads == 1:
        adam.update_part(0, *arguments)
    else:
        launch(adam.update_parallel, threads, *arguments)


def _threads_for(grad: FloatArray) -> int:
    return 1 if grad.nbytes < PARALLEL_FROM_BYTES else numba_threads()


def _bits(array: FloatArray) -> NDArray[Any]:
    """Numba has no float16: its bits travel as integers, see _kernels/bits.py."""
    return array.view(np.int16) if array.dtype == np.float16 else array


def _like(array: FloatArray) -> NDArray[Any]:
    """An empty array tells the kernels how to read an address."""
    return np.empty(0, np.int16 if array.dtype == np.float16 else array.dtype)


def _addressable(g: FloatArray) -> FloatArray:
    if g.strides[1] == g.itemsize and g.flags.aligned and g.dtype.isnative:
        return g
    return np.array(g, g.dtype.newbyteorder("="), order="C")

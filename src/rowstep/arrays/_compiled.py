"""Call the CPU kernels, which Numba compiles at first use and caches. Operands are float32 or float64."""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from .._kernels.elements import over_elements
from .._kernels.pool import numba_threads
from .._kernels.rows import Kind, over_rows
from .._kernels.workspace import Workspace, borrow
from .._rules.adam import Scalars
from . import _reference
from ._checks import FloatArray, native

# As ``_kernels/elements`` and ``_kernels/job`` have them.
_ELEMENTS = struct.Struct("=6q7d")
_JOB = struct.Struct("=16q7d")

_TYPES = {"f": types.float32, "d": types.float64}

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
    kernel = over_elements(_TYPES[p.dtype.char], _TYPES[g.dtype.char], _has_decay(scalars))
    workspace = borrow(Workspace)
    with blocks:
        for block in blocks:
            threads, pace = kernel.threads_for(block[3].nbytes, numba_threads())
            addresses = (array.ctypes.data for array in block)
            told = _ELEMENTS.pack(threads, *addresses, block[0].size, *_numbers(scalars))
            kernel.run(threads, workspace.tell(told), pace)
    workspace.give_back()


def step_rows(
    p: FloatArray, m: FloatArray, v: FloatArray, rows: NDArray[np.int64], g: FloatArray, scalars: Scalars
) -> None:
    """Step the rows of ``p`` that ``rows`` names, in place. Duplicates are added in order of occurrence."""
    if not (p.flags.c_contiguous and p.flags.aligned and p.dtype.isnative):
        _reference.step_rows(p, m, v, rows, g, scalars)
        return
    columns = math.prod(p.shape[1:])
    g = g.reshape(len(rows), columns)
    if not (g.strides[1] == g.itemsize and g.flags.aligned and g.dtype.isnative):
        g = np.array(g, native(g.dtype), order="C")
    job = _JOB.pack(
        rows.ctypes.data, len(rows), g.ctypes.data, g.strides[0], (len(rows) - 1).bit_length(), 0,
        len(p), columns, (len(p) - 1).bit_length(), p.ctypes.data, m.ctypes.data, v.ctypes.data, 0, 0, 0, 0,
        *_numbers(scalars),
    )  # fmt: skip
    stored = _TYPES[p.dtype.char]
    given, decay = _TYPES[g.dtype.char], _has_decay(scalars)
    kernel = over_rows(Kind(stored, stored, stored, given, types.float64, decay=decay, as_dense=True))
    workspace = borrow(Workspace, kernel)
    workspace.add(len(rows), columns, g.nbytes, job)
    workspace.check()
    workspace.reserve(numba_threads())
    workspace.run()
    workspace.give_back()


def _numbers(scalars: Scalars) -> tuple[float, ...]:
    *others, shrink, decay = scalars
    return *others, 1.0 if shrink is None else shrink, decay or 0.0, 1.0


def _has_decay(scalars: Scalars) -> bool | None:
    """Whether there is coupled weight decay, as kernels are told."""
    return None if scalars.decay is None else True

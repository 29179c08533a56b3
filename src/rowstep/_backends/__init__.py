"""Which implementation runs, for each tensor of the torch optimizers: chosen here and nowhere else.

The kernels take what lies in this machine's memory without gaps. The reference takes everything: GPUs and other
devices, strides of their own. ``ROWSTEP_BACKEND=reference`` or ``=numba`` in the environment forces one. Without Numba
the reference runs, and one warning says so.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from .._choice import choose
from .._gradient import RowGradient, outside_message
from . import reference


def kernels() -> Any:
    """The compiled kernels, or None where the reference runs. Numba is imported by the first table that asks."""
    return _load(os.environ.get("ROWSTEP_BACKEND", ""))


def for_gradient(gradient: RowGradient) -> Any:
    """The implementation that can take this gradient."""
    compiled = kernels()
    is_taken = compiled is not None and not gradient.is_empty and compiled.words_of(gradient) is not None
    return compiled if is_taken else reference


def outside(gradient: RowGradient) -> IndexError | None:
    """What to raise if a gradient names a row that is not in its table."""
    row = for_gradient(gradient).first_outside(gradient)
    return None if row is None else IndexError(outside_message(row, gradient.row_count))


@functools.cache
def _load(name: str) -> Any:
    chosen = choose(name, f"{__name__}.numba", f"{__name__}.reference")
    return None if chosen is reference else chosen

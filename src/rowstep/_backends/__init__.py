"""Which implementation runs, for each tensor of the torch optimizers: chosen here and nowhere else.

    numba       tables in this machine's memory, without gaps
    triton      tables on a GPU, without gaps, where there is Triton, as there is with torch's builds for GPUs
    reference   everything: other devices, dtypes and strides

``ROWSTEP_BACKEND`` in the environment forces one of them; what that one does not take is left to the reference. Without
Numba the reference runs, and one warning says so; likewise with a Triton that is too old, or that finds no C compiler.
"""

from __future__ import annotations

import functools
import os
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from .._choice import choose
from .._gradient import RowGradient, outside_message
from .._warnings import warn
from . import reference


def kernels_for(tensor: Tensor) -> Any:
    """The kernels for where a tensor is, or None where the reference runs. The first call imports Numba or Triton."""
    compiled = _load(os.environ.get("ROWSTEP_BACKEND", ""), tensor.is_cpu)
    return compiled if compiled is not None and compiled.runs_on(tensor.device) else None


def for_gradient(gradient: RowGradient) -> Any:
    """The implementation that can take this gradient."""
    compiled = kernels_for(gradient.values)
    is_taken = compiled is not None and not gradient.is_empty and compiled.words_of(gradient) is not None
    return compiled if is_taken else reference


def outside(gradient: RowGradient, implementation: Any = None) -> IndexError | None:
    """What to raise if a gradient names a row that is not in its table."""
    row = (implementation or for_gradient(gradient)).first_outside(gradient)
    return None if row is None else IndexError(outside_message(row, gradient.row_count))


@functools.cache
def _load(name: str, on_cpu: bool) -> Any:
    if name == "triton" or (name == "" and not on_cpu):
        try:
            _check_triton()
            return import_module(f"{__name__}.triton")
        except ImportError as error:
            if name == "triton":
                raise ImportError(
                    f"ROWSTEP_BACKEND is 'triton', but Triton cannot be used: {error}. Install triton, or unset it"
                ) from error
            if not isinstance(error, ModuleNotFoundError):
                warn(f"rowstep is using its slow reference implementation on the GPU, because {error}", RuntimeWarning)
            return None
    chosen = choose(name, f"{__name__}.numba", f"{__name__}.reference", others=("triton",))
    return None if chosen is reference else chosen


def _check_triton() -> None:
    """Raise ImportError unless Triton can compile the kernels and launch them."""
    triton: Any = import_module("triton")
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7):  # a function cannot return None there
        raise ImportError(f"Triton {triton.__version__} cannot compile the kernels; expected 3.7 or newer")
    if torch.cuda.is_available():
        try:
            _ = triton.runtime.driver.active  # builds its launcher, in C; images without a compiler are common
        except Exception as error:
            raise ImportError(
                f"Triton cannot launch kernels: {error}; expected a C compiler and Python's headers"
            ) from error

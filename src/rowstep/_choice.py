"""Whether compiled kernels run or the reference: what ``ROWSTEP_BACKEND`` says, else the kernels if Numba is there."""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import Any


def choose(name: str, compiled: str, reference: str, *, stacklevel: int) -> Any:
    """One of two modules, by the value of ROWSTEP_BACKEND; the compiled one is imported only if it is chosen.

    ``stacklevel`` leads from the caller of this function to the line that the warning is about.
    """
    if name not in ("", "numba", "reference"):
        raise ValueError(f"ROWSTEP_BACKEND is {name!r}; expected 'numba' or 'reference'")
    if name != "reference":
        try:
            return import_module(compiled)
        except ImportError as error:
            if name == "numba":
                raise
            warnings.warn(
                f"rowstep runs its slow reference implementation, because Numba could not be imported: {error}",
                RuntimeWarning,
                stacklevel=stacklevel + 1,
            )
    return import_module(reference)

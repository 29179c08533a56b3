"""Whether compiled kernels run or the reference: what ``ROWSTEP_BACKEND`` says, else whether Numba can compile."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

# Imported for its side effect: from now on it sees every fork.
from . import _fork as _fork
from ._warnings import warn


def choose(name: str, compiled: str, reference: str, others: Sequence[str] = ()) -> Any:
    """One of two modules, by the value of ROWSTEP_BACKEND; the compiled one is imported only if it is chosen.

    ``others`` are names that the caller knows besides.
    """
    if name not in ("", "numba", "reference"):
        known = ", ".join(map(repr, (*others, "numba")))
        raise ValueError(f"ROWSTEP_BACKEND is {name!r}; expected {known} or 'reference'")
    if name == "reference":
        return import_module(reference)
    try:
        if not import_module("numba").config.DISABLE_JIT:
            return import_module(compiled)
        if name == "numba":
            raise RuntimeError(
                "ROWSTEP_BACKEND is 'numba', but NUMBA_DISABLE_JIT=1 disables Numba's compiler; unset one of them"
            )
        reason = "NUMBA_DISABLE_JIT=1 disables Numba's compiler"
    except ImportError as error:
        if name == "numba":
            raise
        reason = f"Numba could not be imported: {error}"
    warn(f"rowstep is using its slow reference implementation, because {reason}", RuntimeWarning)
    return import_module(reference)

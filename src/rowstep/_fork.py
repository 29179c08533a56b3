"""What a forked process must know: whether Numba's threads were left behind in its parent.

Threads do not survive a fork. Numba's other layers start new ones in the child, but OpenMP ends a child that gives it
work, or waits for ever in a grandchild. This file is imported with the first optimizer class, and imports neither Numba
nor torch: the threads may have been started by other Numba code of the program, before rowstep's first step.
"""

from __future__ import annotations

import os
import sys

_threads_left_behind = False


def threads_left_behind() -> bool:
    """Whether Numba's threads cannot be used in this process, because they run in the one it was forked from."""
    return _threads_left_behind


def _note() -> None:
    global _threads_left_behind
    numba_threads = sys.modules.get("numba.np.ufunc.parallel")
    if getattr(numba_threads, "_threading_layer", None) == "omp":  # None until there are threads
        _threads_left_behind = True


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_note)

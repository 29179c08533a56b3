"""What a forked process must know: which threads were left behind in its parent, and which locks they held.

Threads do not survive a fork. Numba's other layers start new ones in the child, but OpenMP ends a child that gives it
work, or waits for ever in a grandchild. This file is imported with the first optimizer class, and imports neither Numba
nor torch: the threads may have been started by other Numba code of the program, before rowstep's first step.

A thread that held an optimizer's lock had perhaps moved some of its rows and not yet the others.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from typing import Any

_threads_left_behind = False

_optimizers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def note(optimizer: Any) -> None:
    _optimizers[id(optimizer)] = optimizer


def optimizers() -> list[Any]:
    """All that there are: for their locks, and for what they have to write before the process ends."""
    # Listed in one call, while other threads may make more of them.
    return [optimizer for each in _optimizers.valuerefs() if (optimizer := each()) is not None]


def threads_left_behind() -> bool:
    """Whether Numba's threads cannot be used in this process, because they run in the one it was forked from."""
    return _threads_left_behind


def _note() -> None:
    global _threads_left_behind
    numba_threads = sys.modules.get("numba.np.ufunc.parallel")
    if getattr(numba_threads, "_threading_layer", None) == "omp":  # None until there are threads
        _threads_left_behind = True


class _LockLeftBehind:
    """In place of an optimizer's lock that a thread of the parent held. Whoever wants it first is told, once."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._waiting = None if optimizer._lock is optimizer._bare_lock else optimizer._lock

    def __enter__(self) -> None:
        optimizer: Any = self._optimizer()
        lock = threading.RLock()
        if self._waiting is not None:
            self._waiting._lock = lock
        optimizer._bare_lock, optimizer._lock = lock, self._waiting or lock
        raise RuntimeError(
            f"this process was forked while another thread used its {type(optimizer).__name__}, so some rows of the "
            "tables may have taken a step or caught up, and others not; expected a fork between steps. Load a "
            "checkpoint here. This is raised once: then the tables are taken as they are"
        )

    def __exit__(self, *_: object) -> None:
        """Never called."""


def _renew_locks() -> None:
    for optimizer in optimizers():
        lock = optimizer._bare_lock
        if isinstance(lock, _LockLeftBehind):
            continue
        if lock.acquire(blocking=False):  # free, or held by the thread that has forked
            lock.release()
        else:
            optimizer._bare_lock = optimizer._lock = _LockLeftBehind(optimizer)


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_note)
    os.register_at_fork(after_in_child=_renew_locks)

"""Call a kernel once for each part of the work, on Numba's threads, without Numba's ``prange``.

``prange`` compiles what it calls three more times: 2.5 s of a first step of 6.3 went there. All it does in the end is
to hand a function to the thread pool, and that is done here: the arguments are put into memory once, and a function of
the pool's own signature takes them from there and calls the kernel for the parts that it is given. Kernels raise
nothing, so nothing is made of what they return.

With a Numba whose pool is not the one that we know, ``prange`` it is.
"""

from __future__ import annotations

import os
import threading
from typing import Any

from numba import config, get_num_threads, njit, prange, types
from numba.extending import intrinsic

from .._fork import threads_left_behind
from . import SEMANTICS, internals
from .cache import kernel

# Numba's workqueue layer ends the process when two threads give it work at the same time. The lock is re-entrant: a
# kernel compiles at its first call, for seconds, and a signal handler or a finalizer that runs in the meantime, in the
# same thread, may launch another to save a checkpoint.
_one_at_a_time = threading.RLock()


class OverThreads:
    """A kernel ``part_kernel(part, *arguments)``, to be called for all parts.

    The result has the same bits for any number of threads.
    """

    def __init__(self, part_kernel: Any, number: str = "") -> None:
        self.part_kernel, self.number = part_kernel, number
        """``number``: the type that it computes with, where callers have to make room to compute in."""

        def on_pool(pool, threads, parts, *arguments):
            call_for_parts(pool, threads, parts, part_kernel, arguments)

        on_pool.__qualname__ = f"{part_kernel.__name__}.on_pool"
        self._on_pool = kernel(on_pool)
        self._by_prange: Any = None

    def __call__(self, parts: int, *arguments: Any) -> None:
        """Call the kernel for every part: a single one on the calling thread, several on the pool's."""
        if parts == 1:
            self.part_kernel(0, *arguments)
            return
        self.on_threads(parts, parts, *arguments)

    def on_threads(self, threads: int, parts: int, *arguments: Any) -> None:
        """Call the kernel for every part, on so many threads, of which there may be fewer than parts."""
        if threads == 1:
            for part in range(parts):
                self.part_kernel(part, *arguments)
            return
        with _one_at_a_time:
            pool = _pool()
            if pool is not None:
                self._on_pool(pool, min(threads, parts, config.NUMBA_NUM_THREADS), parts, *arguments)
            else:
                self._with_prange()(parts, *arguments)

    def _with_prange(self) -> Any:
        if self._by_prange is None:
            part_kernel = self.part_kernel

            @njit(parallel=True, **SEMANTICS)
            def by_prange(parts, *arguments):
                for part in prange(parts):
                    part_kernel(part, *arguments)

            self._by_prange = by_prange
        return self._by_prange


def _pool() -> int | None:
    """The address of the function that gives Numba's threads work, or 0 where the calling thread has to do it all."""
    if config.NUMBA_NUM_THREADS == 1 or threads_left_behind():
        return 0
    return internals.pool_address()


def numba_threads() -> int:
    """How many threads ``numba.set_num_threads`` allows; by default one for each core."""
    internals.pool_address()  # or else Numba starts them now
    return int(get_num_threads())


def _renew_lock() -> None:
    """The thread that held the lock may not exist in this process."""
    global _one_at_a_time
    _one_at_a_time = threading.RLock()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_renew_lock)


@intrinsic
def call_for_parts(typing_context, pool, threads, parts, part_kernel, arguments):
    """Call ``part_kernel(part, *arguments)`` for every part, on as many threads; without a pool, one by one."""
    compiled = internals.compiled_for(typing_context, part_kernel, (types.int64, *arguments.types))

    def codegen(context, builder, signature, values):
        pool, threads, parts, _, arguments_value = values
        internals.call_on_pool(context, builder, compiled, pool, threads, parts, arguments_value)
        return context.get_dummy_value()

    return types.void(pool, threads, parts, part_kernel, arguments), codegen

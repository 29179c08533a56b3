"""Call a kernel once for each part of the work, on Numba's threads, without Numba's ``prange``.

``prange`` compiles what it calls three more times: 2.5 s of a first step of 6.3 went there. All it does in the end is
to hand a function to the thread pool, and that is done here, once for all kernels: a function of the pool's own
signature calls the kernel, which it knows by its address, for the parts that it is given. Kernels raise nothing and
return a number, of which nothing is made.

With a Numba whose pool is not the one that we know, the calling thread does it all.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Any

from numba import config, get_num_threads, types
from numba.extending import intrinsic

from .._fork import threads_left_behind
from . import internals
from .cache import Kernel, kernel
from .pace import Pace

# Below this many bytes of gradient, waking threads costs more than they save.
PARALLEL_FROM_BYTES = 128 << 10

# Numba's workqueue layer ends the process when two threads give it work at the same time. The lock is re-entrant: a
# kernel compiles at its first call, for seconds, and a signal handler or a finalizer that runs in the meantime, in the
# same thread, may launch another to save a checkpoint.
_one_at_a_time = threading.RLock()


class OverThreads:
    """A kernel ``call(part, told_at)``, to be called for all parts of the work.

    The result has the same bits for any number of threads.
    """

    __slots__ = ("_address", "_paces", "kernel", "number")

    def __init__(self, kernel: Kernel, number: Any) -> None:
        self.kernel, self.number = kernel, number
        """``number``: the type that it computes with."""
        self._address = 0
        self._paces: dict[int, Pace] = {}

    def threads_for(self, byte_count: int, most: int) -> tuple[int, Pace | None]:
        """How many threads a launch of this size should have, and who wants to know how long it took."""
        if most == 1 or byte_count < PARALLEL_FROM_BYTES:
            return 1, None
        pace = self._paces.setdefault(byte_count.bit_length(), Pace())
        return pace.threads(most), pace

    def run(self, parts: int, told_at: int, pace: Pace | None) -> None:
        """Call the kernel for every part, on a thread for each."""
        if pace is None:
            self.kernel.call(0, told_at)
            return
        began = time.perf_counter()
        self._run(parts, told_at)
        pace.took(parts, time.perf_counter() - began)

    def _run(self, parts: int, told_at: int) -> None:
        pool = _pool() if parts > 1 else 0
        if not pool:
            for part in range(parts):
                self.kernel.call(part, told_at)
            return
        if not self._address:
            self._address = self.kernel.address
        with _one_at_a_time:
            _on_pool.call(pool, min(parts, config.NUMBA_NUM_THREADS), parts, self._address, told_at)


def _pool() -> int:
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
def call_for_parts(typing_context, pool, threads, parts, address, told):
    """Call the kernel at this address for every part, on as many threads."""

    def codegen(context, builder, signature, values):
        internals.call_on_pool(builder, *values)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), codegen


@kernel(*[types.int64] * 5)
def _on_pool(pool, threads, parts, address, told):
    call_for_parts(pool, threads, parts, address, told)
    return 0

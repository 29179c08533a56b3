"""Call a kernel once for each part of the work, on Numba's threads, without Numba's ``prange``.

``prange`` compiles what it calls three more times: 2.5 s of a first step of 6.3 went there. All it does in the end is
to hand a function to the thread pool, and that is done here: the arguments are put into memory once, and a function of
the pool's own signature takes them from there and calls the kernel, which it knows by its address, for the parts that
it is given. So this is compiled once for all kernels that take the same types. Kernels raise nothing and return a
number, of which nothing is made.

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
from .cache import kernel
from .pace import Pace

# Below this many bytes of gradient, waking threads costs more than they save.
PARALLEL_FROM_BYTES = 128 << 10

# Numba's workqueue layer ends the process when two threads give it work at the same time. The lock is re-entrant: a
# kernel compiles at its first call, for seconds, and a signal handler or a finalizer that runs in the meantime, in the
# same thread, may launch another to save a checkpoint.
_one_at_a_time = threading.RLock()


class OverThreads:
    """A kernel ``part_kernel(part, *arguments)``, to be called for all parts.

    The result has the same bits for any number of threads.
    """

    __slots__ = ("_address", "_paces", "number", "part_kernel")

    def __init__(self, part_kernel: Any, number: str = "") -> None:
        self.part_kernel, self.number = part_kernel, number
        """``number``: the type that it computes with, where callers have to make room to compute in."""
        self._address = 0
        self._paces: dict[int, Pace] = {}

    def threads_for(self, byte_count: int, most: int) -> tuple[int, Pace | None]:
        """How many threads a launch of this size should have, and who wants to know how long it took."""
        if most == 1 or byte_count < PARALLEL_FROM_BYTES:
            return 1, None
        pace = self._paces.setdefault(byte_count.bit_length(), Pace())
        return pace.threads(most), pace

    def __call__(self, parts: int, *arguments: Any, pace: Pace | None = None) -> None:
        """Call the kernel for every part, on a thread for each."""
        began = time.perf_counter()
        self._call(parts, *arguments)
        if pace is not None:
            pace.took(parts, time.perf_counter() - began)

    def _call(self, parts: int, *arguments: Any) -> None:
        pool = _pool() if parts > 1 else 0
        if not pool:
            for part in range(parts):
                self.part_kernel(part, *arguments)
            return
        if not self._address:
            self._address = internals.compiled_address(self.part_kernel, (0, *arguments))
        with _one_at_a_time:
            _on_pool(pool, min(parts, config.NUMBA_NUM_THREADS), parts, self._address, *arguments)


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
def call_for_parts(typing_context, pool, threads, parts, address, arguments):
    """Call the kernel at this address for every part, on as many threads."""

    def codegen(context, builder, signature, values):
        internals.call_on_pool(context, builder, (types.int64, *arguments.types), *values)
        return context.get_dummy_value()

    return types.void(pool, threads, parts, address, arguments), codegen


@kernel
def _on_pool(pool, threads, parts, address, *arguments):
    call_for_parts(pool, threads, parts, address, arguments)

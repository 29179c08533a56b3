"""Call a kernel once for each part of the work, on Numba's threads, without Numba's ``prange``.

``prange`` compiles what it calls three more times: 2.5 s of a first step of 6.3 went there. All it does in the end is
to hand a function to the thread pool, and that is done here: the arguments are put into memory once, and a function of
the pool's own signature takes them from there and calls the kernel for the parts that it is given. Kernels raise
nothing, so nothing is made of what they return.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import config, get_num_threads, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.ufunc.parallel import _launch_threads

from .._fork import threads_left_behind

_BYTES, _I64 = ir.IntType(8).as_pointer(), ir.IntType(64)

# What the pool calls: the argument vector, how many parts, steps of the argument vector, data of the caller.
_TASK = ir.FunctionType(ir.VoidType(), [_BYTES.as_pointer(), _I64.as_pointer(), _I64.as_pointer(), _BYTES])

# The pool's entry: task, arguments, dimensions, steps, data, inner dimensions, number of arguments, threads.
_POOL = ir.FunctionType(ir.VoidType(), [_BYTES] * 5 + [_I64] * 3)


# Numba's workqueue layer ends the process when two threads give it work at the same time. The lock is re-entrant: a
# kernel compiles at its first call, for seconds, and a signal handler or a finalizer that runs in the meantime, in the
# same thread, may launch another to save a checkpoint.
_one_at_a_time = threading.RLock()


def launch(kernel: Any, parts: int, *arguments: Any) -> None:
    """Call a kernel that is made of ``call_for_parts``."""
    with _one_at_a_time:
        kernel(_pool(), min(parts, config.NUMBA_NUM_THREADS), *arguments)


def _pool():
    """The address of the function that gives Numba's threads work, or 0 where the calling thread has to do it all.

    The result has the same bits for any number of threads.
    """
    return 0 if config.NUMBA_NUM_THREADS == 1 or threads_left_behind() else _started_pool()


@functools.cache
def _started_pool():
    torch = sys.modules.get("torch")
    if torch is None:
        _launch_threads()
    else:
        # Numba's OpenMP layer sets the number of threads for torch too, to all there are.
        threads = torch.get_num_threads()
        _launch_threads()
        torch.set_num_threads(threads)
    return llvm.address_of_symbol("numba_parallel_for")


def numba_threads() -> int:
    """How many threads ``numba.set_num_threads`` allows; by default one for each core."""
    _started_pool()  # or else Numba starts them now
    return int(get_num_threads())


def _renew_lock():
    """The thread that held the lock may not exist in this process."""
    global _one_at_a_time
    _one_at_a_time = threading.RLock()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_renew_lock)


@intrinsic
def call_for_parts(typing_context, pool, threads, parts, kernel, arguments):
    """Call ``kernel(part, *arguments)`` for every part, on as many threads; without a pool, one after the other."""
    call = kernel.get_call_type(typing_context, (types.int64, *arguments.types), {})

    def codegen(context, builder, signature, values):
        pool, threads, parts, _, arguments_value = values
        memory = cgutils.alloca_once_value(builder, arguments_value)
        task = _task(context, builder.module, kernel.dispatcher.get_compile_result(call), memory.type)
        # The pool adds, for its i-th share, as many steps to each argument. The one argument begins at 0 and steps by
        # 1: as a number, it says at which part a share begins.
        vector = cgutils.alloca_once_value(builder, ir.Constant(_BYTES, None))
        steps = cgutils.alloca_once_value(builder, _I64(1))
        dimensions = cgutils.alloca_once_value(builder, parts)
        in_bytes = [builder.bitcast(pointer, _BYTES) for pointer in (task, vector, dimensions, steps, memory)]
        with builder.if_else(builder.icmp_unsigned("==", pool, _I64(0))) as (alone, shared):
            with alone:
                builder.call(task, [vector, dimensions, steps, in_bytes[-1]])
            with shared:
                builder.call(builder.inttoptr(pool, _POOL.as_pointer()), [*in_bytes, _I64(0), _I64(1), threads])
        return context.get_dummy_value()

    return types.void(pool, threads, parts, kernel, arguments), codegen


def _task(context, module, kernel, memory_type):
    """A function for the pool that calls the kernel for a share of the parts."""
    context.active_code_library.add_linking_library(kernel.library)
    task = ir.Function(module, _TASK, module.get_unique_name("rowstep_task"))
    task.linkage = "internal"
    builder = ir.IRBuilder(task.append_basic_block())
    vector, dimensions, _, data = task.args
    first = builder.ptrtoint(builder.load(vector), _I64)
    arguments = cgutils.unpack_tuple(builder, builder.load(builder.bitcast(data, memory_type)))
    with cgutils.for_range(builder, builder.load(dimensions)) as share:
        part = builder.add(first, share.index)
        context.call_internal_no_propagate(builder, kernel.fndesc, kernel.signature, [part, *arguments])
    builder.ret_void()
    return task

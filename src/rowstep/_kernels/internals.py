"""Everything of Numba's that Numba does not promise to keep. No other file of this package imports it.

what                                        for what                        if it changes
``cgutils``, how a compiled function takes  calling a kernel from another   kernels do not compile: tests fail at once
its arguments, where its code is            one or from a thread
``_launch_threads``, the symbol             threads without ``prange``      ``pool_address`` is 0, and one thread does
``numba_parallel_for``                                                      all of the work
``Dispatcher.compile``                      calls without a look at types   the same
``Dispatcher._cache``, ``CompileResult``'s  kernels on disk                 each process compiles its kernels
``_reduce`` and ``_rebuild``, ``magic_tuple``,
``serialize.dumps``, ``user_cache_dir``

``rowstep._fork`` also looks at one name, ``_threading_layer``, in a Numba that others may have imported: it must not
import Numba itself. Without that name, a forked child uses the threads as Numba would.
"""

from __future__ import annotations

import functools
import inspect
import pickle
import sys
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import cgutils
from numba.misc.appdirs import user_cache_dir as user_cache_dir
from numba.np.ufunc import parallel

BYTES, INT64 = ir.IntType(8).as_pointer(), ir.IntType(64)

# What the pool calls: the argument vector, how many parts, steps of the argument vector, data of the caller.
_TASK = ir.FunctionType(ir.VoidType(), [BYTES.as_pointer(), INT64.as_pointer(), INT64.as_pointer(), BYTES])

# The pool's entry: task, arguments, dimensions, steps, data, inner dimensions, number of arguments, threads.
_POOL = ir.FunctionType(ir.VoidType(), [BYTES] * 5 + [INT64] * 3)

# How Numba itself declares both, with white space removed.
_DECLARED = (
    "parallel_for_ty=ir.FunctionType(ir.VoidType(),[byte_ptr_t]*5+[intp_t,]*3)",
    "innerfunc_fnty=ir.FunctionType(ir.VoidType(),[byte_ptr_ptr_t,intp_ptr_t,intp_ptr_t,byte_ptr_t],)",
)


# Memory


def on_the_stack(builder: Any, count: int) -> Any:
    """The address of room for so many 64-bit numbers, for as long as the calling function runs."""
    # Not alloca_once, which fills it with zeros: as one store of 4096 numbers that took 2 s to compile.
    with builder.goto_entry_block():
        return builder.ptrtoint(builder.alloca(ir.ArrayType(INT64, count)), INT64)


def llvm_function(builder: Any, shape: Any, name: str) -> Any:
    """One of LLVM's own functions."""
    return cgutils.get_or_insert_function(builder.module, shape, name)


# Threads


@functools.cache
def pool_address() -> int:
    """Start Numba's threads; tell where the function is that gives them work, or 0 if it is another than we know."""
    torch = sys.modules.get("torch")
    if torch is None:
        parallel._launch_threads()
    else:
        # Numba's OpenMP layer sets the number of threads for torch too, to all there are.
        threads = torch.get_num_threads()
        parallel._launch_threads()
        torch.set_num_threads(threads)
    return int(llvm.address_of_symbol("numba_parallel_for") or 0) if _is_as_declared() else 0


def _is_as_declared() -> bool:
    """Whether the installed Numba declares the pool's functions as we do: a call by address is checked by nobody."""
    try:
        source = "".join(inspect.getsource(parallel).split())
    except (OSError, TypeError):
        return False
    return all(declaration in source for declaration in _DECLARED)


def call_on_pool(builder: Any, pool: Any, threads: Any, parts: Any, kernel: Any, told: Any) -> None:
    """Emit a call of the kernel at an address for every part, on as many threads, with a number that all are told."""
    memory = cgutils.alloca_once_value(builder, cgutils.make_anonymous_struct(builder, [kernel, told]))
    task = _task(builder.module, memory.type)
    # The pool adds, for its i-th share, as many steps to each argument. The one argument begins at 0 and steps by 1: as
    # a number, it says at which part a share begins.
    vector = cgutils.alloca_once_value(builder, ir.Constant(BYTES, None))
    steps = cgutils.alloca_once_value(builder, INT64(1))
    dimensions = cgutils.alloca_once_value(builder, parts)
    in_bytes = [builder.bitcast(pointer, BYTES) for pointer in (task, vector, dimensions, steps, memory)]
    builder.call(builder.inttoptr(pool, _POOL.as_pointer()), [*in_bytes, INT64(0), INT64(1), threads])


def _task(module: Any, memory_type: Any) -> Any:
    """A function for the pool that calls a kernel, which lies in front of what it is told, for a share of the parts."""
    task = ir.Function(module, _TASK, module.get_unique_name("rowstep_task"))
    task.linkage = "internal"
    builder = ir.IRBuilder(task.append_basic_block())
    vector, dimensions, _, data = task.args
    first = builder.ptrtoint(builder.load(vector), INT64)
    kernel, told = cgutils.unpack_tuple(builder, builder.load(builder.bitcast(data, memory_type)))
    with cgutils.for_range(builder, builder.load(dimensions)) as share:
        call_code(builder, kernel, [builder.add(first, share.index), told])
    builder.ret_void()
    return task


# Code


def call_code(builder: Any, address: Any, integers: Any) -> Any:
    """Emit a call of what was compiled at this address, which takes 64-bit integers and returns one."""
    result, error = cgutils.alloca_once(builder, INT64), cgutils.alloca_once(builder, BYTES)
    passed = [result, error, *integers]
    shape = ir.FunctionType(ir.IntType(32), [value.type for value in passed])
    builder.call(builder.inttoptr(address, shape.as_pointer()), passed)
    return builder.load(result)


def address_of_code(compiled: Any) -> int:
    """Where a compiled kernel begins."""
    return int(compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name))


# Kernels on disk


def set_cache(dispatcher: Any, cache: Any) -> None:
    """Let a dispatcher ask this cache before it compiles: ``load_overload``, ``save_overload``."""
    dispatcher._cache = cache


def processor(codegen: Any) -> Any:
    """What a kernel is compiled for: the processor's name and features, among others."""
    return codegen.magic_tuple()


def packed(compiled: Any) -> bytes:
    """A compiled kernel as bytes."""
    from numba.core.serialize import dumps

    if compiled.lifted or compiled.library.has_dynamic_globals:
        raise ValueError("a kernel depends on addresses of this process")
    content: bytes = dumps(compiled._reduce())
    return content


def unpacked(content: bytes, target_context: Any) -> Any:
    """The compiled kernel that these bytes were made of."""
    from numba.core.compiler import CompileResult

    return CompileResult._rebuild(target_context, *pickle.loads(content))

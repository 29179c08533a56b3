"""Raw addresses as typed pointers, which the flat kernels read and write.

These are intrinsics, which emit their few instructions where they are used. As functions, each would be compiled
separately for every type it is called with, and compiling is what a first step spends its time on.
"""

from __future__ import annotations

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from . import INLINE, internals

CACHE_LINE = 64

_I8, _I32 = ir.IntType(8), ir.IntType(32)


@intrinsic
def pointer(typing_context, address, kind):
    """The memory at an address, as numbers of this type. Whoever made the address keeps the memory alive."""
    result = types.CPointer(kind.instance_type)

    def codegen(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(result))

    return result(types.int64, kind), codegen


@intrinsic
def address_of(typing_context, array):
    """Where an array's numbers begin."""

    def codegen(context, builder, signature, arguments):
        return internals.address_of(context, builder, array, arguments[0])

    return types.int64(array), codegen


@intrinsic
def only_if(typing_context, is_there, value):
    """The value, or None where ``is_there`` is None."""
    result = types.none if isinstance(is_there, types.NoneType) else value

    def codegen(context, builder, signature, arguments):
        return context.get_dummy_value() if result is types.none else arguments[1]

    return result(is_there, value), codegen


@intrinsic
def room(typing_context, count):
    """Room for a literal number of int64, on the stack.

    A part of the work must not run out of memory. On a thread of the pool nobody would hear of it, and the other parts
    would have been updated.
    """
    if not isinstance(count, types.IntegerLiteral):
        return None
    size, result = count.literal_value, types.CPointer(types.int64)

    def codegen(context, builder, signature, arguments):
        return builder.inttoptr(internals.on_the_stack(builder, size), context.get_value_type(result))

    return result(count), codegen


@intrinsic
def _prefetch_line(typing_context, address):
    def codegen(context, builder, signature, arguments):
        pointer = _I8.as_pointer()
        shape = ir.FunctionType(ir.VoidType(), [pointer, _I32, _I32, _I32])
        read, keep_close, data = _I32(0), _I32(3), _I32(1)
        function = internals.llvm_function(builder, shape, "llvm.prefetch.p0")
        builder.call(function, [builder.inttoptr(arguments[0], pointer), read, keep_close, data])

    return types.void(types.int64), codegen


@njit(**INLINE)
def prefetch(address, byte_count):
    """Ask for a row's cache lines; beyond eight the hardware's own prefetcher has caught on."""
    for offset in range(0, min(byte_count, 8 * CACHE_LINE), CACHE_LINE):
        _prefetch_line(address + offset)

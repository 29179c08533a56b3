"""Raw addresses as arrays, and prefetch.

These are intrinsics, which emit their few instructions where they are used. As functions, each would be compiled
separately for every type it is called with, and compiling is what a first step spends its time on.
"""

from __future__ import annotations

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from . import INNER, internals

CACHE_LINE = 64

_I8, _I32 = ir.IntType(8), ir.IntType(32)


@intrinsic
def address_of(typing_context, array):
    """Where an array's numbers begin."""

    def codegen(context, builder, signature, arguments):
        return internals.address_of(context, builder, array, arguments[0])

    return types.int64(array), codegen


@intrinsic
def borrowed(typing_context, array):
    """The same array without its reference count, for use in loops; whoever called the kernel keeps it alive.

    What is inlined into a loop counts the references to its arguments there, one atomic operation after the other.
    Threads then fight for the counter of an array that none of them writes to: kernels of 26 tables of 16 columns, the
    same ids every time, took 2.7 ms so and 1.2 ms without (the least of 600 runs); on one thread 2.7 and 2.1.
    """

    def codegen(context, builder, signature, arguments):
        return internals.without_reference_count(context, builder, array, arguments[0])

    return array(array), codegen


@intrinsic
def row_at(typing_context, address, columns, like):
    """The memory at ``address`` as an array with the element type of the array ``like``.

    Unlike an array of Numba's own, it is not reference counted; that alone costs tens of nanoseconds a row. Whoever
    made the address keeps the memory alive.
    """
    row = types.Array(like.dtype, 1, "C")

    def codegen(context, builder, signature, arguments):
        return internals.array_at(context, builder, row, *arguments[:2])

    return row(types.int64, types.int64, like), codegen


@intrinsic
def optional_row_at(typing_context, is_there, address, columns, like):
    """``row_at(address, columns, like)``, or None where ``is_there`` is None."""
    row = types.none if isinstance(is_there, types.NoneType) else types.Array(like.dtype, 1, "C")

    def codegen(context, builder, signature, arguments):
        if row is types.none:
            return context.get_dummy_value()
        return internals.array_at(context, builder, row, *arguments[1:3])

    return row(is_there, types.int64, types.int64, like), codegen


def _numbers_at(kind):
    """An intrinsic ``(address, count)``: the memory at an address as an array of numbers of this kind.

    Not as a NumPy array from Python: a tensor that has given one away can never be resized again, and autograd resizes
    the gradients that it accumulates into.
    """
    result = types.Array(kind, 1, "C")

    @intrinsic
    def numbers_at(typing_context, address, count):
        def codegen(context, builder, signature, arguments):
            return internals.array_at(context, builder, result, *arguments)

        return result(types.int64, types.int64), codegen

    return numbers_at


int32s_at, int64s_at = _numbers_at(types.int32), _numbers_at(types.int64)
uint64s_at, float64s_at = _numbers_at(types.uint64), _numbers_at(types.float64)


@intrinsic
def int64s_on_the_stack(typing_context, count):
    """Room for a literal number of int64, on the stack.

    A part of the work must not run out of memory. On a thread of the pool nobody would hear of it, and the other parts
    would have been updated.
    """
    if not isinstance(count, types.IntegerLiteral):
        return None
    size, result = count.literal_value, types.Array(types.int64, 1, "C")

    def codegen(context, builder, signature, arguments):
        room = internals.on_the_stack(builder, size)
        return internals.array_at(context, builder, result, room, context.get_constant(types.intp, size))

    return result(count), codegen


@intrinsic
def is_there(typing_context, option):
    """Whether an option is not None: a constant, so that LLVM drops what does not apply."""
    there = not isinstance(option, types.NoneType)

    def codegen(context, builder, signature, arguments):
        return context.get_constant(types.boolean, there)

    return types.boolean(option), codegen


@intrinsic
def only_if(typing_context, is_there, value):
    """The value, or None where ``is_there`` is None."""
    result = types.none if isinstance(is_there, types.NoneType) else value

    def codegen(context, builder, signature, arguments):
        return context.get_dummy_value() if result is types.none else arguments[1]

    return result(is_there, value), codegen


@intrinsic
def unless(typing_context, is_there):
    """True where ``is_there`` is None, and None elsewhere: of two branches that exclude each other, Numba drops one."""
    result = types.boolean if isinstance(is_there, types.NoneType) else types.none

    def codegen(context, builder, signature, arguments):
        return context.get_dummy_value() if result is types.none else context.get_constant(types.boolean, True)

    return result(is_there), codegen


@intrinsic
def has_type_of(typing_context, array, other):
    """Whether two arrays have the same element type: a constant, so that LLVM drops the branch that does not apply."""
    same = array.dtype == other.dtype

    def codegen(context, builder, signature, arguments):
        return context.get_constant(types.boolean, same)

    return types.boolean(array, other), codegen


@intrinsic
def _prefetch_line(typing_context, address):
    def codegen(context, builder, signature, arguments):
        pointer = _I8.as_pointer()
        shape = ir.FunctionType(ir.VoidType(), [pointer, _I32, _I32, _I32])
        read, keep_close, data = _I32(0), _I32(3), _I32(1)
        function = internals.llvm_function(builder, shape, "llvm.prefetch.p0")
        builder.call(function, [builder.inttoptr(arguments[0], pointer), read, keep_close, data])

    return types.void(types.int64), codegen


@njit(**INNER)
def prefetch(address, byte_count):
    """Ask for a row's cache lines; beyond eight the hardware's own prefetcher has caught on."""
    for offset in range(0, min(byte_count, 8 * CACHE_LINE), CACHE_LINE):
        _prefetch_line(address + offset)

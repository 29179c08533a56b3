"""What Numba lacks: raw addresses as arrays, prefetch, and the 16-bit floats.

Numba has no float16 or bfloat16 on the CPU. Their bits travel as integers, and the integer type says which they are:
``int16`` holds float16, ``uint16`` holds bfloat16 (the upper half of a float32). ``widen`` and ``narrow`` convert
between what is stored and what is computed with; both vectorise.

These are intrinsics, which emit their few instructions where they are used. As functions, each would be compiled apart
for every type it meets, and compiling is what a first step spends its time on.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np import arrayobj

from . import half

# error_model="numpy": with Python's, the test for a zero divisor keeps LLVM from vectorising (186 ns a row, not 39).
SEMANTICS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}

# For what only kernels call (what Python calls is a `kernel`, see cache.py), and for what runs once per row: a call
# passes an array as seven words on the stack, which at 16 columns costs as much as the row's arithmetic (51 ns a row
# with calls, 28 without).
INNER: dict[str, Any] = SEMANTICS | {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
INLINE: dict[str, Any] = INNER | {"forceinline": True}

CACHE_LINE = 64

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))


@intrinsic
def address_of(typing_context, array):
    """Where an array's numbers begin."""

    def codegen(context, builder, signature, arguments):
        struct = context.make_array(array)(context, builder, arguments[0])
        return builder.ptrtoint(struct.data, _I64)

    return types.int64(array), codegen


@intrinsic
def borrowed(typing_context, array):
    """The same array without its reference count, for use in loops; whoever called the kernel keeps it alive.

    What is inlined into a loop counts the references to its arguments there, one atomic operation after the other.
    Threads then fight for the counter of an array that none of them writes to: kernels of 26 tables of 16 columns, the
    same ids every time, took 2.7 ms so and 1.2 ms without (the least of 600 runs); on one thread 2.7 and 2.1.
    """

    def codegen(context, builder, signature, arguments):
        struct = context.make_array(array)(context, builder, arguments[0])
        struct.meminfo = cgutils.get_null_value(struct.meminfo.type)
        return struct._getvalue()

    return array(array), codegen


@intrinsic
def row_at(typing_context, address, columns, like):
    """The memory at ``address`` as an array with the element type of the array ``like``.

    Unlike an array of Numba's own, it is not reference counted; that alone costs tens of nanoseconds a row. Whoever
    made the address keeps the memory alive.
    """
    row_type = types.Array(like.dtype, 1, "C")

    def codegen(context, builder, signature, arguments):
        row = context.make_array(row_type)(context, builder)
        size = context.get_constant(types.intp, context.get_abi_sizeof(context.get_data_type(row_type.dtype)))
        pointer = builder.inttoptr(arguments[0], row.data.type)
        arrayobj.populate_array(row, pointer, [arguments[1]], [size], size, None)
        return row._getvalue()

    return row_type(types.int64, types.int64, like), codegen


@intrinsic
def ids_at(typing_context, address, count):
    """The memory at ``address`` as row numbers.

    Not as a NumPy array from Python: a tensor that has given one away can never be resized again, and autograd resizes
    the gradients that it accumulates into.
    """
    like = types.Array(types.int64, 1, "C")
    signature, make_row = row_at._defn(typing_context, address, count, like)

    def codegen(context, builder, _, arguments):
        return make_row(context, builder, signature, arguments)

    return like(types.int64, types.int64), codegen


@intrinsic
def optional_row_at(typing_context, address, offset, columns, like):
    """``row_at(address + offset, columns, like)``, or None without an address."""
    if isinstance(address, types.NoneType):
        return types.none(
            address, offset, columns, like
        ), lambda context, builder, signature, arguments: context.get_dummy_value()
    signature, make_row = row_at._defn(typing_context, address, columns, like)

    def codegen(context, builder, _, arguments):
        return make_row(context, builder, signature, [builder.add(*arguments[:2]), *arguments[2:]])

    return signature.return_type(types.int64, types.int64, types.int64, like), codegen


@intrinsic
def has_type_of(typing_context, array, other):
    """Whether two arrays have the same element type: a constant, so that LLVM drops the branch that does not apply."""
    same = array.dtype == other.dtype
    return types.boolean(array, other), lambda context, builder, signature, arguments: context.get_constant(
        types.boolean, same
    )


@intrinsic
def _prefetch_line(typing_context, address):
    def codegen(context, builder, signature, arguments):
        pointer = _I8.as_pointer()
        shape = ir.FunctionType(ir.VoidType(), [pointer, _I32, _I32, _I32])
        function = cgutils.get_or_insert_function(builder.module, shape, "llvm.prefetch.p0")
        read, keep_close, data = _I32(0), _I32(3), _I32(1)
        builder.call(function, [builder.inttoptr(arguments[0], pointer), read, keep_close, data])

    return types.void(types.int64), codegen


@njit(**INNER)
def prefetch(address, byte_count):
    """Ask for a row's cache lines; beyond eight the hardware's own prefetcher has caught on."""
    for offset in range(0, min(byte_count, 8 * CACHE_LINE), CACHE_LINE):
        _prefetch_line(address + offset)


@intrinsic
def widen(typing_context, stored, like):
    """A stored number as the element type of ``like``, a float32 or float64 array."""

    def codegen(context, builder, signature, arguments):
        number, kind = arguments[0], stored
        if stored == types.int16:
            number, kind = half.widen(context, builder, number), types.float32
        elif stored == types.uint16:
            bits = builder.shl(builder.zext(number, _I32), _I32(16))
            number, kind = builder.bitcast(bits, ir.FloatType()), types.float32
        return context.cast(builder, number, kind, like.dtype)

    return like.dtype(stored, like), codegen


@intrinsic
def narrow(typing_context, number, like):
    """A computed number as it is stored in ``like``, rounded to the nearest, ties to even."""

    def codegen(context, builder, signature, arguments):
        if like.dtype not in (types.int16, types.uint16):
            return context.cast(builder, arguments[0], number, like.dtype)
        single = context.cast(builder, arguments[0], number, types.float32)
        if like.dtype == types.int16:
            return half.narrow(context, builder, single)
        bits = builder.bitcast(single, _I32)
        is_odd = builder.and_(builder.lshr(bits, _I32(16)), _I32(1))
        rounded = builder.lshr(builder.add(builder.add(bits, _I32(0x7FFF)), is_odd), _I32(16))
        # Rounding could carry a NaN's payload into infinity.
        is_nan = builder.fcmp_unordered("uno", single, single)
        return builder.trunc(builder.select(is_nan, _I32(0x7FC0), rounded), _I16)

    return like.dtype(number, like), codegen

"""What Numba lacks: raw addresses as arrays, prefetch, and the 16-bit floats.

Numba has no float16 or bfloat16 on the CPU. Their bits travel as integers, and the integer type says which they are:
``int16`` holds float16, ``uint16`` holds bfloat16 (the upper half of a float32). ``widen`` and ``narrow`` convert
between what is stored and what is computed with; both vectorise.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

# error_model="numpy": with Python's, the test for a zero divisor keeps LLVM from vectorising (186 ns a row, not 39).
JIT: dict[str, Any] = {"cache": True, "nogil": True, "error_model": "numpy"}

# For what runs once per row: a call passes an array as seven words on the stack, which at 16 columns costs as much as
# the row's arithmetic (51 ns a row with calls, 28 without).
INLINE: dict[str, Any] = JIT | {"forceinline": True}

CACHE_LINE = 64


@intrinsic
def _pointer(typing_context, address, like):
    signature = types.CPointer(like.dtype)(types.int64, like)

    def codegen(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return signature, codegen


@njit(**INLINE)
def row_at(address, columns, like):
    """The memory at ``address`` as an array with the element type of the array ``like``.

    Unlike an array of Numba's own, it is not reference counted; that alone costs tens of nanoseconds a row.
    """
    return carray(_pointer(address, like), (columns,))


def optional_row_at(address, offset, columns, like):
    """``row_at(address + offset)``, or None without an address."""
    raise RuntimeError("runs in compiled code only")


@overload(optional_row_at, jit_options=INLINE)
def _optional_row_at(address, offset, columns, like):
    if isinstance(address, types.NoneType):
        return lambda address, offset, columns, like: None
    return lambda address, offset, columns, like: row_at(address + offset, columns, like)


@njit(**INLINE)
def borrowed(array):
    """The same array without its reference count. The caller keeps it alive."""
    return row_at(np.int64(array.ctypes.data), array.size, array)


@intrinsic
def _prefetch_line(typing_context, address):
    def codegen(context, builder, signature, arguments):
        pointer, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
        shape = ir.FunctionType(ir.VoidType(), [pointer, flag, flag, flag])
        function = cgutils.get_or_insert_function(builder.module, shape, "llvm.prefetch.p0")
        read, keep_close, data = flag(0), flag(3), flag(1)
        builder.call(function, [builder.inttoptr(arguments[0], pointer), read, keep_close, data])

    return types.void(types.int64), codegen


@njit(**INLINE)
def prefetch(address, byte_count):
    """Ask for a row's cache lines; beyond eight the hardware's own prefetcher has caught on."""
    for offset in range(0, min(byte_count, 8 * CACHE_LINE), CACHE_LINE):
        _prefetch_line(address + offset)


@intrinsic
def _half_to_float(typing_context, bits):
    def codegen(context, builder, signature, arguments):
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.int16), codegen


@intrinsic
def _float_to_half(typing_context, number):
    def codegen(context, builder, signature, arguments):
        return builder.bitcast(builder.fptrunc(arguments[0], ir.HalfType()), ir.IntType(16))

    return types.int16(types.float32), codegen


@intrinsic
def _bits_to_float(typing_context, bits):
    def codegen(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), codegen


@intrinsic
def _float_to_bits(typing_context, number):
    def codegen(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), codegen


def widen(stored, like):
    """A stored number as the element type of ``like``, a float32 or float64 array."""
    raise RuntimeError("runs in compiled code only")


@overload(widen, jit_options=INLINE)
def _widen(stored, like):
    if stored == types.int16:
        return lambda stored, like: like.dtype.type(_half_to_float(stored))
    if stored == types.uint16:
        return lambda stored, like: like.dtype.type(_bits_to_float(np.uint32(stored) << np.uint32(16)))
    return lambda stored, like: like.dtype.type(stored)


def narrow(number, like):
    """A computed number as it is stored in ``like``, rounded to the nearest, ties to even."""
    raise RuntimeError("runs in compiled code only")


@overload(narrow, jit_options=INLINE)
def _narrow(number, like):
    if like.dtype == types.int16:
        return lambda number, like: _float_to_half(np.float32(number))
    if like.dtype == types.uint16:
        return _narrow_to_bfloat16
    return lambda number, like: like.dtype.type(number)


def _narrow_to_bfloat16(number, like):
    bits = _float_to_bits(np.float32(number))
    half_way = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    rounded = np.uint16((bits + half_way) >> np.uint32(16))
    # Rounding could carry a NaN's payload into infinity.
    return np.uint16(0x7FC0) if number != number else rounded

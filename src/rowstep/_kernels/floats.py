"""bfloat16, which Numba lacks on the CPU.

Its bits, the upper half of a float32, travel as ``uint16``. ``widen`` and ``narrow`` convert between what is stored and
what is computed with; both vectorise.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_I16, _I32 = ir.IntType(16), ir.IntType(32)


@intrinsic
def widen(typing_context, stored, like):
    """A stored number as the element type of ``like``, a float32 or float64 array."""

    def codegen(context, builder, signature, arguments):
        number, kind = arguments[0], stored
        if stored == types.uint16:
            bits = builder.shl(builder.zext(number, _I32), _I32(16))
            number, kind = builder.bitcast(bits, ir.FloatType()), types.float32
        return context.cast(builder, number, kind, like.dtype)

    return like.dtype(stored, like), codegen


@intrinsic
def narrow(typing_context, number, like):
    """A computed number as it is stored in ``like``, rounded to the nearest, ties to even."""

    def codegen(context, builder, signature, arguments):
        if like.dtype != types.uint16:
            return context.cast(builder, arguments[0], number, like.dtype)
        single = context.cast(builder, arguments[0], number, types.float32)
        bits = builder.bitcast(single, _I32)
        is_odd = builder.and_(builder.lshr(bits, _I32(16)), _I32(1))
        rounded = builder.lshr(builder.add(builder.add(bits, _I32(0x7FFF)), is_odd), _I32(16))
        # Rounding could carry a NaN's payload into infinity.
        is_nan = builder.fcmp_unordered("uno", single, single)
        return builder.trunc(builder.select(is_nan, _I32(0x7FC0), rounded), _I16)

    return like.dtype(number, like), codegen


@intrinsic
def narrow_by(typing_context, number, like, bits):
    """``narrow``, rounded up or down as the lower 16 of these random bits say; see ``_rules/rounding.py``.

    What is not stored in 16 bits is not rounded at random.
    """

    def codegen(context, builder, signature, arguments):
        if like.dtype != types.uint16:
            return context.cast(builder, arguments[0], number, like.dtype)
        single = context.cast(builder, arguments[0], number, types.float32)
        random = builder.and_(context.cast(builder, arguments[2], bits, types.uint32), _I32(0xFFFF))
        # Infinity has a lower half of zeros, which nothing carries out of. A NaN that was computed has the uppermost
        # bit of its fraction set, and stays one if nothing is added.
        exact = builder.bitcast(single, _I32)
        is_nan = builder.fcmp_unordered("uno", single, single)
        added = builder.add(exact, builder.select(is_nan, _I32(0), random))
        return builder.trunc(builder.lshr(added, _I32(16)), _I16)

    return like.dtype(number, like, bits), codegen


@intrinsic
def optional_number(typing_context, number, like):
    """A number as the element type of ``like``; None stays None."""
    result = types.none if isinstance(number, types.NoneType) else like.dtype

    def codegen(context, builder, signature, arguments):
        if result is types.none:
            return context.get_dummy_value()
        return context.cast(builder, arguments[0], number, like.dtype)

    return result(number, like), codegen

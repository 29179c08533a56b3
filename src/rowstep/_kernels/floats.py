"""Numbers as they are stored and as they are computed with.

Numba has no bfloat16 on the CPU. Its bits, the upper half of a float32, travel as ``uint16``. All of this vectorises.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_I16, _I32 = ir.IntType(16), ir.IntType(32)


@intrinsic
def widen(typing_context, stored, kind):
    """A stored number as one of the type computed with."""

    def codegen(context, builder, signature, arguments):
        return _widened(context, builder, arguments[0], stored, kind.instance_type)

    return kind.instance_type(stored, kind), codegen


@intrinsic
def narrow(typing_context, number, kind):
    """A computed number as one of the type that is stored, rounded to the nearest, ties to even."""

    def codegen(context, builder, signature, arguments):
        return _narrowed(context, builder, arguments[0], number, kind.instance_type, None)

    return kind.instance_type(number, kind), codegen


@intrinsic
def load(typing_context, stored, index, is_there, kind):
    """``widen(stored[index], kind)``, or None where ``is_there`` is None."""
    if isinstance(is_there, types.NoneType):
        return types.none(
            stored, index, is_there, kind
        ), lambda context, builder, signature, arguments: context.get_dummy_value()
    element = stored.dtype

    def codegen(context, builder, signature, arguments):
        place = builder.gep(arguments[0], [arguments[1]])
        return _widened(context, builder, builder.load(place), element, kind.instance_type)

    return kind.instance_type(stored, types.int64, is_there, kind), codegen


@intrinsic
def store(typing_context, stored, index, number, kind, bits):
    """``stored[index] = number``, rounded to this type: to the nearest, or by random bits. None is not stored."""
    signature = types.void(stored, types.int64, number, kind, bits)
    if isinstance(number, types.NoneType):
        return signature, lambda context, builder, signature, arguments: None

    def codegen(context, builder, signature, arguments):
        random = None if isinstance(bits, types.NoneType) else context.cast(builder, arguments[4], bits, types.uint32)
        value = _narrowed(context, builder, arguments[2], number, kind.instance_type, random)
        builder.store(value, builder.gep(arguments[0], [arguments[1]]))

    return signature, codegen


def _widened(context, builder, number, stored, wanted):
    if stored == types.uint16:
        bits = builder.shl(builder.zext(number, _I32), _I32(16))
        number, stored = builder.bitcast(bits, ir.FloatType()), types.float32
    return context.cast(builder, number, stored, wanted)


def _narrowed(context, builder, number, computed, wanted, random):
    if wanted != types.uint16:
        return context.cast(builder, number, computed, wanted)
    single = context.cast(builder, number, computed, types.float32)
    exact, is_nan = builder.bitcast(single, _I32), builder.fcmp_unordered("uno", single, single)
    if random is None:
        is_odd = builder.and_(builder.lshr(exact, _I32(16)), _I32(1))
        rounded = builder.lshr(builder.add(builder.add(exact, _I32(0x7FFF)), is_odd), _I32(16))
        # Rounding could carry a NaN's payload into infinity.
        return builder.trunc(builder.select(is_nan, _I32(0x7FC0), rounded), _I16)
    # Infinity has a lower half of zeros, which nothing carries out of. A NaN that was computed has the uppermost bit of
    # its fraction set, and stays one if nothing is added.
    added = builder.add(exact, builder.select(is_nan, _I32(0), builder.and_(random, _I32(0xFFFF))))
    return builder.trunc(builder.lshr(added, _I32(16)), _I16)

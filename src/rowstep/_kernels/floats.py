"""bfloat16, which Numba lacks on the CPU.

Its bits, the upper half of a float32, travel as ``uint16``. ``widen`` and ``narrow`` convert between what is stored and
what is computed with; both vectorise.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_I16, _I32 = ir.IntType(16), ir.IntType(32)


def _element(like):
    """The type of the elements of an array, or the type itself."""
    return like.instance_type if isinstance(like, types.NumberClass) else like.dtype


@intrinsic
def widen(typing_context, stored, like):
    """A stored number as the element type of ``like``, a float32 or float64 array."""

    def codegen(context, builder, signature, arguments):
        number, kind = arguments[0], stored
        if stored == types.uint16:
            bits = builder.shl(builder.zext(number, _I32), _I32(16))
            number, kind = builder.bitcast(bits, ir.FloatType()), types.float32
        return context.cast(builder, number, kind, _element(like))

    return _element(like)(stored, like), codegen


@intrinsic
def narrow(typing_context, number, like):
    """A computed number as it is stored in ``like``, rounded to the nearest, ties to even."""

    def codegen(context, builder, signature, arguments):
        if _element(like) != types.uint16:
            return context.cast(builder, arguments[0], number, _element(like))
        single = context.cast(builder, arguments[0], number, types.float32)
        bits = builder.bitcast(single, _I32)
        is_odd = builder.and_(builder.lshr(bits, _I32(16)), _I32(1))
        rounded = builder.lshr(builder.add(builder.add(bits, _I32(0x7FFF)), is_odd), _I32(16))
        # Rounding could carry a NaN's payload into infinity.
        is_nan = builder.fcmp_unordered("uno", single, single)
        return builder.trunc(builder.select(is_nan, _I32(0x7FC0), rounded), _I16)

    return _element(like)(number, like), codegen


@intrinsic
def narrow_by(typing_context, number, like, bits):
    """``narrow``, rounded up or down as the lower 16 of these random bits say; see ``_rules/rounding.py``.

    What is not stored in 16 bits is not rounded at random.
    """

    def codegen(context, builder, signature, arguments):
        if _element(like) != types.uint16:
            return context.cast(builder, arguments[0], number, _element(like))
        single = context.cast(builder, arguments[0], number, types.float32)
        random = builder.and_(context.cast(builder, arguments[2], bits, types.uint32), _I32(0xFFFF))
        # Infinity has a lower half of zeros, which nothing carries out of. A NaN that was computed has the uppermost
        # bit of its fraction set, and stays one if nothing is added.
        exact = builder.bitcast(single, _I32)
        is_nan = builder.fcmp_unordered("uno", single, single)
        added = builder.add(exact, builder.select(is_nan, _I32(0), random))
        return builder.trunc(builder.lshr(added, _I32(16)), _I16)

    return _element(like)(number, like, bits), codegen


@intrinsic
def optional_number(typing_context, number, like):
    """A number as the element type of ``like``; None stays None."""
    result = types.none if isinstance(number, types.NoneType) else _element(like)

    def codegen(context, builder, signature, arguments):
        if result is types.none:
            return context.get_dummy_value()
        return context.cast(builder, arguments[0], number, _element(like))

    return result(number, like), codegen


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

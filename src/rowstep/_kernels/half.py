"""float16 to float32 and back, on processors with an instruction for it and on those without.

Where there is none (x86 without F16C), LLVM calls a library function that is not there, and the process ends. So the
conversions are done on the bits instead: a few integer operations each, with the same result in every bit, NaNs
included. The instructions stay in use where they exist: a number takes 0.07 ns with them and 0.3 ns without.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from . import internals

_I16, _I32, _FLOAT = ir.IntType(16), ir.IntType(32), ir.FloatType()

_INFINITY = 0x7C00
_SIGN = 0x8000

# Bits of a float32: how much larger its exponents are, and the powers of two at the ends of what a normal half can be.
_BIAS = (127 - 15) << 23
_SMALLEST_NORMAL = (127 - 14) << 23
_BEYOND_LARGEST = (127 + 16) << 23
_LARGEST = _BEYOND_LARGEST - (1 << 13)


def widen(context, builder, half):
    """The float32 of a half's bits."""
    if has_instructions(context):
        return builder.fpext(builder.bitcast(half, ir.HalfType()), _FLOAT)
    return widen_bits(builder, half)


def narrow(context, builder, single):
    """The bits of the half nearest to a float32, ties to even."""
    if has_instructions(context):
        return builder.bitcast(builder.fptrunc(single, ir.HalfType()), _I16)
    return narrow_bits(builder, single)


def rounded_by(builder, single, random):
    """A float32 that a half can hold, above or below this one, as 16 random bits say.

    From the largest half on there is nothing above that a half could hold: that is left to ``narrow``.
    """
    bits = builder.bitcast(single, _I32)
    magnitude = builder.and_(bits, _I32(0x7FFFFFFF))
    # A normal half has 13 bits less.
    normal = builder.and_(builder.add(bits, builder.and_(random, _I32(0x1FFF))), _I32(~0x1FFF & 0xFFFFFFFF))
    # Below them halves are whole multiples of 2**-24.
    is_small = builder.icmp_unsigned("<", magnitude, _I32(_SMALLEST_NORMAL))
    small = builder.select(is_small, builder.bitcast(magnitude, _FLOAT), _FLOAT(0.0))  # of others a cast is undefined
    multiple = builder.fmul(small, _FLOAT(2.0**24))
    below = builder.fptosi(multiple, _I32)
    rest = builder.fmul(builder.fsub(multiple, builder.sitofp(below, _FLOAT)), _FLOAT(2.0**16))
    is_up = builder.fcmp_ordered("<", builder.uitofp(random, _FLOAT), rest)
    whole = builder.add(below, builder.zext(is_up, _I32))
    subnormal = builder.bitcast(builder.fmul(builder.sitofp(whole, _FLOAT), _FLOAT(2.0**-24)), _I32)
    subnormal = builder.or_(subnormal, builder.and_(bits, _I32(_SIGN << 16)))
    is_beyond = builder.icmp_unsigned(">=", magnitude, _I32(_LARGEST))
    result = builder.select(is_small, subnormal, builder.select(is_beyond, bits, normal))
    return builder.bitcast(result, _FLOAT)


def has_instructions(context: Any) -> bool:
    """Whether the target processor can convert halves itself.

    A cached kernel is looked up by the processor's name and features, so it never meets a processor that lacks them.
    """
    triple, _, features = internals.processor(context.codegen())
    return triple.startswith(("aarch64", "arm64")) or "+f16c" in features.split(",")


# Neither of the two meets a subnormal float32 that matters: some programs have their processor take those for zero.


def widen_bits(builder, half):
    """``widen`` in integer operations and one subtraction."""
    bits = builder.zext(half, _I32)
    magnitude = builder.and_(bits, _I32(_SIGN - 1))
    in_place = builder.shl(magnitude, _I32(13))
    normal = builder.add(in_place, _I32(_BIAS))
    # A subnormal is x * 2**-14 with x < 1. With the exponent that makes it (1 + x) * 2**-14, subtract 2**-14.
    too_large = builder.bitcast(builder.add(in_place, _I32(_SMALLEST_NORMAL)), _FLOAT)
    subnormal = builder.bitcast(builder.fsub(too_large, _FLOAT(2.0**-14)), _I32)
    infinity = builder.add(normal, _I32(_BIAS))
    nan = builder.or_(infinity, _I32(1 << 22))
    result = builder.select(builder.icmp_unsigned("<", magnitude, _I32(0x400)), subnormal, normal)
    result = builder.select(builder.icmp_unsigned("==", magnitude, _I32(_INFINITY)), infinity, result)
    result = builder.select(builder.icmp_unsigned(">", magnitude, _I32(_INFINITY)), nan, result)
    sign = builder.shl(builder.and_(bits, _I32(_SIGN)), _I32(16))
    return builder.bitcast(builder.or_(result, sign), _FLOAT)


def narrow_bits(builder, single):
    """``narrow`` in integer operations and one addition."""
    bits = builder.bitcast(single, _I32)
    magnitude = builder.and_(bits, _I32(0x7FFFFFFF))
    # 2**16 becomes infinity by itself, and so does what is rounded up to it.
    is_in_range = builder.icmp_unsigned("<", magnitude, _I32(_BEYOND_LARGEST))
    bounded = builder.select(is_in_range, magnitude, _I32(_BEYOND_LARGEST))
    is_odd = builder.and_(builder.lshr(bounded, _I32(13)), _I32(1))
    rounded = builder.add(builder.add(bounded, _I32(0xFFF)), is_odd)
    normal = builder.lshr(builder.sub(rounded, _I32(_BIAS)), _I32(13))
    # The last place of 0.5 is that of a subnormal half: the sum is rounded there, and its last bits are the half's.
    rounded_sum = builder.fadd(builder.bitcast(magnitude, _FLOAT), _FLOAT(0.5))
    subnormal = builder.sub(builder.bitcast(rounded_sum, _I32), builder.bitcast(_FLOAT(0.5), _I32))
    result = builder.select(builder.icmp_unsigned("<", magnitude, _I32(_SMALLEST_NORMAL)), subnormal, normal)
    payload = builder.and_(builder.lshr(magnitude, _I32(13)), _I32(0x1FF))
    is_nan = builder.fcmp_unordered("uno", single, single)
    result = builder.select(is_nan, builder.or_(payload, _I32(_INFINITY | 0x200)), result)
    sign = builder.and_(builder.lshr(bits, _I32(16)), _I32(_SIGN))
    return builder.trunc(builder.or_(result, sign), _I16)

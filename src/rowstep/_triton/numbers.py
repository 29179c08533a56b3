"""The rule, rounding and roots, for kernels: the texts of ``_rules`` wherever Triton can read them."""

from __future__ import annotations

import types
from typing import Any

import triton
import triton.language as tl

from .._rules import adam, rounding


def shared(function: Any) -> Any:
    """A function of ``_rules`` as Triton compiles it.

    Triton reads module-level names only where they are constants of its own: integers are, and annotations are nothing.
    """
    known = {name: value for name, value in function.__globals__.items() if not name.startswith("__")}
    names = {name: tl.constexpr(value if isinstance(value, int) else None) for name, value in known.items()}
    copied = types.FunctionType(function.__code__, names | {"tl": tl}, function.__name__)
    copied.__module__, copied.__qualname__ = function.__module__, function.__qualname__
    return triton.jit(copied)


rule = shared(adam.update)
averaged = shared(adam.averaged)
_mixed = shared(rounding.mixed)
_row_key = shared(rounding.row_key)
_weights_key = shared(rounding.weights_key)
_random_bits = shared(rounding.random_bits)


@triton.jit
def _low(x):
    return x.to(tl.uint32)


@triton.jit
def _mix(x):
    return _mixed(x, _low)


@triton.jit
def state_key(key, row):
    """The key of a row's moments in a step."""
    return _row_key(_low(key), row, _low, _mix)


@triton.jit
def weights_key(key, row):
    """The key of a row's weights."""
    return _weights_key(state_key(key, row), _low, _mix)


@triton.jit
def bits_of(key, columns):
    """32 random bits for each of these columns: the lower half is for a first moment, the upper for a second."""
    return _random_bits(key, columns, _low, _mix)


@triton.jit
def root(x):
    """The square root, rounded to the nearest as the CPU does. ``tl.sqrt`` approximates it in float32."""
    if x.dtype == tl.float32:
        return tl.sqrt_rn(x)
    else:  # noqa: RET505  Triton compiles both otherwise, and refuses the first for float64
        return tl.sqrt(x)


@triton.jit
def maximum(u, v):
    """The larger one; a NaN on either side stays one, as torch.maximum has it."""
    return tl.where((u > v) | (u != u), u, v)


@triton.jit
def widen(stored, N: tl.constexpr):
    """Stored numbers as the type computed with."""
    if stored.dtype == tl.bfloat16:
        stored = stored.to(tl.float32)
    return stored.to(N)


@triton.jit
def load(place, is_there, N: tl.constexpr):
    """The numbers there as the type computed with, and 0 elsewhere."""
    return widen(tl.load(place, mask=is_there, other=0.0), N)


@triton.jit
def store(place, is_there, number, bits):
    """Write numbers in the type that is stored: rounded to the nearest, or by the lower 16 of these random bits.

    bfloat16 is rounded on the bits, because Triton's interpreter truncates where devices round.
    """
    if place.dtype.element_ty == tl.bfloat16:
        single = number.to(tl.float32)
        exact, is_nan = single.to(tl.uint32, bitcast=True), single != single
        if bits is None:
            bits = 0x7FFF + ((exact >> 16) & 1)
        # A NaN's payload could be cut off, or carried into infinity.
        cut = tl.where(is_nan, 0x7FC0, (exact + (bits & 0xFFFF)) >> 16)
        tl.store(place, cut.to(tl.uint16).to(tl.bfloat16, bitcast=True), mask=is_there)
    else:
        tl.store(place, number.to(place.dtype.element_ty), mask=is_there)

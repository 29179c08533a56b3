"""The random bits of ``_rules/rounding.py`` in kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

from .._rules import rounding
from . import INLINE

_mixed = njit(**INLINE)(rounding.mixed)
_row_key = njit(**INLINE)(rounding.row_key)
_weights_key = njit(**INLINE)(rounding.weights_key)
_random_bits = njit(**INLINE)(rounding.random_bits)


def bits_of(rounds: Any) -> tuple[Any, Any, Any, Any]:
    """Functions for kernels: the key of a row's moments in a step, that of its weights; the bits of a weight or a first
    moment, and those of a second moment, from the first's. All of them give None where ``rounds`` is None.
    """
    if rounds is None:
        return no_key, no_key, no_key, no_bits
    return _state_key, _weights_key_of, _first_bits, _second_bits


@njit(**INLINE)
def _mix(x):
    return _mixed(x, np.uint32)


@njit(**INLINE)
def _state_key(row, key):
    return _row_key(np.uint32(key), row, np.uint32, _mix)


@njit(**INLINE)
def _weights_key_of(row, key):
    return _weights_key(_state_key(row, key), np.uint32, _mix)


@njit(**INLINE)
def _first_bits(key, column):
    return _random_bits(key, column, np.uint32, _mix)


@njit(**INLINE)
def _second_bits(bits):
    return bits >> np.uint32(16)


# Intrinsics, so that rounding to the nearest has nothing to compile.


@intrinsic
def no_key(typing_context, first, second):
    """None."""
    return types.none(first, second), lambda context, builder, signature, arguments: context.get_dummy_value()


@intrinsic
def no_bits(typing_context, bits):
    """None."""
    return types.none(bits), lambda context, builder, signature, arguments: context.get_dummy_value()

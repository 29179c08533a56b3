"""The random bits of ``_rules/rounding.py`` in kernels.

A key that is None stands for rounding to the nearest.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from .._rules import rounding
from . import INLINE

_mixed = njit(**INLINE)(rounding.mixed)
_row_key = njit(**INLINE)(rounding.row_key)
_weights_key = njit(**INLINE)(rounding.weights_key)
_random_bits = njit(**INLINE)(rounding.random_bits)


@njit(**INLINE)
def mix(x):
    return _mixed(x, np.uint32)


@njit(**INLINE)
def state_key(row, key, rounds_state):
    """The key of a row's moments in the step with this key, or None."""
    if rounds_state is None:
        return None
    return _row_key(np.uint32(key), row, np.uint32, mix)


@njit(**INLINE)
def weights_key(row, key, rounds_weights):
    """The key of a row's weights in the step with this key, or None."""
    if rounds_weights is None:
        return None
    return _weights_key(_row_key(np.uint32(key), row, np.uint32, mix), np.uint32, mix)


@njit(**INLINE)
def first_bits(key, column):
    """The random bits of a weight or a first moment, or None."""
    if key is None:
        return None
    return _random_bits(key, column, np.uint32, mix)


@njit(**INLINE)
def second_bits(bits):
    """Those of a second moment."""
    if bits is None:
        return None
    return bits >> np.uint32(16)

"""The random bits of ``_rules/rounding.py`` in kernels, and numbers stored by them.

A key that is None stands for rounding to the nearest.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from .._rules import rounding
from . import INLINE
from .floats import narrow, narrow_by

_mixed = njit(**INLINE)(rounding.mixed)
_row_key = njit(**INLINE)(rounding.row_key)
_weights_key = njit(**INLINE)(rounding.weights_key)
_random_bits = njit(**INLINE)(rounding.random_bits)

# Four words say how the rows of a table are rounded: the step's key, and which rows of the whole table they are.
KEY, FIRST_ROW, FACTOR, TABLE_ROWS = range(4)
WORDS = 4

_LOW_BITS = 21


@njit(**INLINE)
def mix(x):
    return _mixed(x, np.uint32)


@njit(**INLINE)
def state_key(row, words, rounds_state):
    """The key of a row's moments, or None."""
    if rounds_state is None:
        return None
    return _row_key(np.uint32(words[KEY]), number_in_table(row, words), np.uint32, mix)


@njit(**INLINE)
def weights_key(row, words, rounds_weights):
    """The key of a row's weights, or None."""
    if rounds_weights is None:
        return None
    key = _row_key(np.uint32(words[KEY]), number_in_table(row, words), np.uint32, mix)
    return _weights_key(key, np.uint32, mix)


@njit(**INLINE)
def number_in_table(row, words):
    """The number of a row in the whole table, of which this may be a part, in another order; see ``_layout.py``."""
    number, factor, rows = row + words[FIRST_ROW], words[FACTOR], words[TABLE_ROWS]
    if factor == 1:
        return number
    # In two halves: the product itself may not fit into 64 bits.
    number %= rows
    high, low = factor >> _LOW_BITS, factor & ((1 << _LOW_BITS) - 1)
    return (((number * high % rows) << _LOW_BITS) % rows + number * low % rows) % rows


@njit(**INLINE)
def stored_first(number, like, key, column):
    """A first moment or a weight as it is stored in ``like``."""
    if key is None:
        return narrow(number, like)
    return narrow_by(number, like, _random_bits(key, column, np.uint32, mix))


@njit(**INLINE)
def stored_second(number, like, key, column):
    """A second moment as it is stored in ``like``."""
    if key is None:
        return narrow(number, like)
    return narrow_by(number, like, _random_bits(key, column, np.uint32, mix) >> np.uint32(16))

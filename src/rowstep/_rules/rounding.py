"""Rounding up or down at random, so that what is stored in 16 bits is right on average.

bfloat16 has 8 significant bits. A moment that should grow by a thousandth of itself, rounded to the nearest, does not
grow at all, however often it should. Rounded up with a probability as large as the part that is cut off, it grows as it
should on average.

The random bits are no generator's: they depend on the seed, the step, the row and the column, and on nothing else. So a
run gives the same numbers for any number of threads, and again when it is repeated or continued from a checkpoint. Of a
sharded table the row is that of the rank's part.

The functions are written once, for torch tensors, Python's numbers and the integers of a compiled kernel: ``low`` cuts
a number to its lower 32 bits, ``mix`` is ``mixed`` with that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

LARGEST_SEED = (1 << 63) - 1

# 2^32 divided by the golden section, and any other odd number. Without the first, zero would be mixed to zero.
_APART = 0x9E3779B9
_FOR_WEIGHTS = 0x5851F42D

_Cut = Callable[[Any], Any]


def mixed(x: Any, low: _Cut) -> Any:
    """32 bits of which each depends on every bit of ``x``. No two x have the same."""
    x = low(x ^ (x >> 16))
    x = low(x * 0x7FEB352D)
    x = low(x ^ (x >> 15))
    x = low(x * 0x846CA68B)
    return low(x ^ (x >> 16))


def row_key(key: Any, row: Any, low: _Cut, mix: _Cut) -> Any:
    """The key of one row in a step, from the step's key and the number of the row."""
    key = mix(low((key ^ low(row)) + _APART))
    return mix(low((key ^ low(row >> 32)) + _APART))


def weights_key(key: Any, low: _Cut, mix: _Cut) -> Any:
    """The key of a row's weights, which are rounded apart from its moments."""
    return mix(low(key ^ _FOR_WEIGHTS))


def random_bits(key: Any, column: Any, low: _Cut, mix: _Cut) -> Any:
    """32 random bits for one number of a row: the lower half for its first moment, the upper half for its second."""
    return mix(low(key + column))


def low_word(number: Any) -> Any:
    """The lower 32 bits of a Python number, or of each number of an int64 tensor."""
    return number & 0xFFFFFFFF


def mix_word(number: Any) -> Any:
    """``mixed``, for Python numbers and int64 tensors."""
    return mixed(number, low_word)


def step_key(seed: int, step: int) -> int:
    """The key of one step, the same for all tables."""
    key: int = row_key(row_key(0, seed, low_word, mix_word), step, low_word, mix_word)
    return key

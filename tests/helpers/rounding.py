"""Numbers in float64, and how far a computation in another dtype may be from them.

A test that holds two computations against each other has to say how far apart rounding may take them. A fixed tolerance
is too tight where digits cancel and too loose everywhere else. So the model computes with ``Rough`` numbers: each
operation adds its own rounding to what its operands bring along, as in the standard model of floating-point error.

Numbers beyond the dtype's largest become infinite, as they would there. An error of infinity means that nothing is
known, for example whether a number has overflowed.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[np.float64]

# Infinities and NaN are results like others here; NumPy warns of them.
quiet = np.errstate(all="ignore")


@dataclass(frozen=True)
class Precision:
    """What a dtype can hold."""

    unit: float
    """Twice the relative error of a correctly rounded operation: torch's square root is not correctly rounded."""
    smallest: float
    largest: float


@functools.cache
def precision_of(dtype: torch.dtype) -> Precision:
    info = torch.finfo(dtype)
    return Precision(info.eps, info.tiny * info.eps, info.max)


def widest(*dtypes: torch.dtype) -> torch.dtype:
    """The dtype in which a computation with these runs: never less than float32."""
    return functools.reduce(torch.promote_types, dtypes, torch.float32)


class Rough:
    """An array of numbers computed in some precision. Of two operands, the left one's precision counts."""

    def __init__(self, value: Array | float, error: Array | float, precision: Precision) -> None:
        self.value, self.error = np.asarray(value), np.asarray(error)
        self.precision = precision

    def rows(self, which: Array) -> Rough:
        """Some rows of a matrix."""
        return Rough(self.value[which], np.broadcast_to(self.error, self.value.shape)[which], self.precision)

    def rounded(self, precision: Precision) -> Rough:
        """The same numbers, rounded to another precision, in which the computation goes on."""
        value = np.where(np.abs(self.value) > precision.largest, np.copysign(np.inf, self.value), self.value)
        size = _size(value)
        error = self.error + precision.unit * size + precision.smallest
        unsure = np.isnan(error) | (size + error > precision.largest)
        error = np.where(np.isfinite(value), error, np.where(np.isfinite(self.error), 0.0, np.inf))
        return Rough(value, np.where(unsure, np.inf, error), precision)

    def _result(self, value: Array, error: Array) -> Rough:
        return Rough(value, error, self.precision).rounded(self.precision)

    def _scalar(self, other: Rough | float) -> Rough:
        return other if isinstance(other, Rough) else Rough(other, self.precision.unit * abs(other), self.precision)

    def __neg__(self) -> Rough:
        return Rough(-self.value, self.error, self.precision)

    def __add__(self, other: Rough | float) -> Rough:
        other = self._scalar(other)
        return self._result(self.value + other.value, self.error + other.error)

    def __sub__(self, other: Rough) -> Rough:
        return self + -other

    def __mul__(self, other: Rough | float) -> Rough:
        other = self._scalar(other)
        error = _size(self.value) * other.error + _size(other.value) * self.error + self.error * other.error
        return self._result(self.value * other.value, error)

    def __truediv__(self, other: Rough | float) -> Rough:
        other = self._scalar(other)
        quotient = self.value / other.value
        least = _size(other.value) - other.error
        error = np.where(least > 0, (self.error + _size(quotient) * other.error) / least, np.inf)
        return self._result(quotient, np.where(np.isfinite(other.value), error, self.error + other.error))

    def sqrt(self) -> Rough:
        root = np.sqrt(self.value)
        return self._result(root, np.minimum(np.sqrt(self.error), self.error / np.maximum(_size(root), 1e-320)))

    def maximum(self, other: Rough) -> Rough:
        """The larger of two, and NaN if one of them is."""
        return Rough(np.maximum(self.value, other.value), np.maximum(self.error, other.error), self.precision)

    def blurred(self, absolute: float, relative: float = 0.0) -> Rough:
        """The same numbers, known less well."""
        return Rough(self.value, self.error + absolute + relative * _size(self.value), self.precision)

    def known_if_finite(self) -> Rough:
        """The same numbers; nothing is known of those that are not finite."""
        return Rough(self.value, np.where(np.isfinite(self.value), self.error, np.inf), self.precision)


def as_rows(array: Array, lead: tuple[int, ...]) -> Array:
    """A view of the array as a matrix whose rows run over its first dimensions, ``lead``."""
    return array.reshape(math.prod(lead), math.prod(array.shape[len(lead) :]))


def _size(value: Array) -> Array:
    """Magnitudes; what is not finite has none, because no error adds to it."""
    return np.where(np.isfinite(value), np.abs(value), 0.0)

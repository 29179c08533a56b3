"""Hyper-parameters that are checked whenever they are set, so that a schedule's mistake shows where it is made."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Set
from typing import Any

import numpy as np

# What could be unpacked into two, but has no order, or no numbers in it.
_NO_SEQUENCES = (Set, Mapping, bytes, bytearray)


def _number(value: Any) -> float | None:
    """A real number, be it Python's, NumPy's or an array without dimensions; None if it is none, as text or a bool."""
    if not isinstance(value, numbers.Real):
        try:
            value = np.asarray(value)
        except (TypeError, ValueError, RuntimeError):
            return None
        if value.ndim or value.dtype.kind not in "iuf":
            return None
    elif isinstance(value, bool):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


class NonNegative:
    """A finite number >= 0, or > 0 where zero has no meaning."""

    def __init__(self, *, zero_allowed: bool = True) -> None:
        self._zero_allowed = zero_allowed
        self._expected = f"a finite number {'>=' if zero_allowed else '>'} 0"

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> float:
        return self if instance is None else instance.__dict__[self._name]  # type: ignore[return-value]

    def __set__(self, instance: Any, value: float) -> None:
        number = _number(value)
        if number is None:
            raise TypeError(f"{self._name} is {value!r}; expected {self._expected}")
        if not (math.isfinite(number) and (number > 0 or (self._zero_allowed and number == 0))):
            raise ValueError(f"{self._name} is {value!r}; expected {self._expected}")
        instance.__dict__[self._name] = number


class Betas:
    """How much of the moments each step keeps: two numbers in [0, 1)."""

    _EXPECTED = "two numbers in [0, 1)"

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> tuple[float, float]:
        return self if instance is None else instance.__dict__[self._name]  # type: ignore[return-value]

    def __set__(self, instance: Any, value: tuple[float, float]) -> None:
        try:
            first, second = (_number(beta) for beta in value)
        except (TypeError, ValueError):
            first = second = None
        if first is None or second is None or isinstance(value, _NO_SEQUENCES):
            raise TypeError(f"{self._name} is {value!r}; expected {self._EXPECTED}")
        if not all(0 <= beta < 1 for beta in (first, second)):
            raise ValueError(f"{self._name} is {value!r}; expected {self._EXPECTED}")
        instance.__dict__[self._name] = first, second

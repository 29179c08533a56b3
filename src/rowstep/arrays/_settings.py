"""Hyper-parameters that are checked whenever they are set, so that a schedule's mistake shows where it is made."""

from __future__ import annotations

import math
from typing import Any


def _number(name: str, value: Any, expected: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} is {value!r}; expected {expected}") from None


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
        number = _number(self._name, value, self._expected)
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
            first, second = value
        except (TypeError, ValueError):
            raise TypeError(f"{self._name} is {value!r}; expected {self._EXPECTED}") from None
        betas = _number(self._name, first, self._EXPECTED), _number(self._name, second, self._EXPECTED)
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"{self._name} is {value!r}; expected {self._EXPECTED}")
        instance.__dict__[self._name] = betas

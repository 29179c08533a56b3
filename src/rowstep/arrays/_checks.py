"""Check settings and operands before anything is changed. Every message names the setting or the parameter."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[Any]
"""Any strides and byte order; float16, float32 or float64."""

FLOATS = tuple(np.dtype(name) for name in ("float16", "float32", "float64"))
Settings = tuple[float, tuple[float, float], float, float]

_NOT_SAVABLE = re.compile("[\0\ud800-\udfff]")
_EXPECTED_FLOATS = "float16, float32 or float64"


def checked_settings(lr: Any, betas: Any, eps: Any, weight_decay: Any) -> Settings:
    """The settings as Python floats."""
    try:
        beta1, beta2 = betas
    except (TypeError, ValueError):
        raise TypeError(f"betas is {betas!r}; expected two numbers in [0, 1)") from None
    return (
        _number("lr", lr, "a finite number >= 0"),
        (_number("betas[0]", beta1, "a number in [0, 1)", 1), _number("betas[1]", beta2, "a number in [0, 1)", 1)),
        _number("eps", eps, "a finite number > 0", zero_allowed=False),
        _number("weight_decay", weight_decay, "a finite number >= 0"),
    )


def _number(setting: str, value: Any, expected: str, below: float = math.inf, *, zero_allowed: bool = True) -> float:
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    if not isinstance(value, (int, float, np.integer, np.floating)) or isinstance(value, bool):
        raise TypeError(f"{setting} is {value!r}; expected {expected}")
    number = float(value)
    if not (0 <= number < below and (number or zero_allowed)):
        raise ValueError(f"{setting} is {value!r}; expected {expected}")
    return number


def check_name(name: object) -> None:
    """Refuse what could be stepped but not saved."""
    if not isinstance(name, str):
        raise TypeError(f"the name {name!r} is a {type(name).__name__}; expected a str")
    if _NOT_SAVABLE.search(name):
        raise ValueError(f"the name {name!r} has a character that cannot be saved; expected valid Unicode without NUL")


def checked_param(name: str, param: object) -> FloatArray:
    """The parameter as a plain array over the same memory."""
    check_name(name)
    if not isinstance(param, np.ndarray) or isinstance(param, np.ma.MaskedArray):
        raise TypeError(f"{name!r}: the parameter is a {type(param).__name__}; expected a NumPy array")
    if native(param.dtype) not in FLOATS:
        raise TypeError(f"{name!r}: the parameter has dtype {param.dtype}; expected {_EXPECTED_FLOATS}")
    if not param.flags.writeable:
        raise ValueError(f"{name!r}: the parameter is read-only; expected a writable array (np.memmap: mode='r+')")
    return np.asarray(param)


def checked_gradient(
    name: str, grad: object, shape: tuple[int, ...], param: FloatArray, *, may_be_param: bool
) -> FloatArray:
    """The gradient as an array of this shape. Writing the parameter must not change what is still to be read of it.

    With ``may_be_param`` it may be the parameter itself: each element is read before it is written.
    """
    if isinstance(grad, np.ma.MaskedArray):
        raise TypeError(f"{name!r}: the gradient is a MaskedArray, whose mask would be ignored; expected a plain array")
    g = np.asarray(grad)
    if native(g.dtype) not in FLOATS:
        raise TypeError(f"{name!r}: the gradient has dtype {g.dtype}; expected {_EXPECTED_FLOATS}")
    if g.shape != shape:
        raise ValueError(
            f"{name!r}: the gradient has shape {g.shape}; expected {shape}, because the parameter has shape "
            f"{param.shape}"
        )
    if np.may_share_memory(param, g):
        is_param = (g.ctypes.data, g.strides, g.dtype) == (param.ctypes.data, param.strides, param.dtype)
        if not (may_be_param and is_param) and np.shares_memory(param, g):
            raise ValueError(
                f"{name!r}: the gradient shares memory with the parameter; expected separate memory. Pass a copy"
            )
    return g


def checked_rows(name: str, rows: object, param: FloatArray) -> NDArray[np.int64]:
    """The row numbers, in the shape they came in, all inside the parameter's first axis."""
    if param.ndim == 0:
        raise ValueError(f"{name!r}: the parameter has shape (), so no rows; expected rows. Use step() instead")
    numbers = np.asarray(rows)
    if numbers.size == 0 and not isinstance(rows, np.ndarray):
        numbers = numbers.astype(np.int64)  # an empty list becomes an array of floats
    if numbers.dtype.kind not in "iu":
        raise TypeError(f"{name!r}: rows has dtype {numbers.dtype}; expected integers")
    if numbers.size and not (numbers.min() >= 0 and numbers.max() < len(param)):
        outside = numbers[(numbers < 0) | (numbers >= len(param))]
        raise IndexError(f"{name!r}: rows contains {outside.flat[0]}; expected 0 <= row < {len(param)}")
    return np.ascontiguousarray(numbers, np.int64).reshape(numbers.shape)


def native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype in this machine's byte order."""
    return dtype.newbyteorder("=")

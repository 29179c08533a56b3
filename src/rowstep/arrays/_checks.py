"""Check settings and operands before anything is changed. Every message names the setting or the parameter."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[Any]
"""Any strides and byte order; float16, float32 or float64."""

FLOATS = tuple(np.dtype(name) for name in ("float16", "float32", "float64"))


def checked_settings(
    lr: Any, betas: Any, eps: Any, weight_decay: Any
) -> tuple[float, tuple[float, float], float, float]:
    """The settings as Python floats."""
    given = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    try:
        beta1, beta2 = map(float, betas)
        lr, eps, weight_decay = float(lr), float(eps), float(weight_decay)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(f"the settings are {given}; expected numbers, and two for betas") from None
    for setting, number, is_valid, expected in (
        ("lr", lr, 0 <= lr < math.inf, "a finite number >= 0"),
        ("betas[0]", beta1, 0 <= beta1 < 1, "a number in [0, 1)"),
        ("betas[1]", beta2, 0 <= beta2 < 1, "a number in [0, 1)"),
        ("eps", eps, 0 < eps < math.inf, "a finite number > 0"),
        ("weight_decay", weight_decay, 0 <= weight_decay < math.inf, "a finite number >= 0"),
    ):
        if not is_valid:
            raise ValueError(f"{setting} is {number}; expected {expected}")
    return lr, (beta1, beta2), eps, weight_decay


def checked_param(name: str, param: object) -> FloatArray:
    """The parameter as a plain array over the same memory."""
    if not isinstance(param, np.ndarray):
        raise TypeError(f"{name!r}: the parameter is a {type(param).__name__}; expected a NumPy array")
    if not param.flags.writeable:
        raise ValueError(f"{name!r}: the parameter is read-only; expected a writable array (np.memmap: mode='r+')")
    return _checked_floats(name, "parameter", param)


def checked_gradient(name: str, grad: object, shape: tuple[int, ...], param: FloatArray) -> FloatArray:
    """The gradient as an array of this shape, which does not change while the parameter is written."""
    g = _checked_floats(name, "gradient", grad)
    if g.shape != shape:
        raise ValueError(f"{name!r}: the gradient has shape {g.shape}; expected {shape} for a parameter {param.shape}")
    return g.copy() if np.may_share_memory(param, g) else g


def _checked_floats(name: str, what: str, array: object) -> FloatArray:
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{name!r}: the {what} is a MaskedArray, whose mask would be ignored; expected a plain array")
    plain = np.asarray(array)
    if native(plain.dtype) not in FLOATS:
        raise TypeError(f"{name!r}: the {what} has dtype {plain.dtype}; expected float16, float32 or float64")
    return plain


def checked_rows(name: str, rows: object, param: FloatArray) -> NDArray[np.int64]:
    """The row numbers, in the shape they came in, all inside the parameter's first axis."""
    if param.ndim == 0:
        raise ValueError(f"{name!r}: the parameter has shape (), so no rows; expected rows. Use step() instead")
    numbers = np.asarray(rows)
    if numbers.size == 0 and not isinstance(rows, np.ndarray):
        numbers = numbers.astype(np.int64)  # an empty list becomes an array of floats
    if numbers.dtype.kind not in "iu":
        raise TypeError(f"{name!r}: rows has dtype {numbers.dtype}; expected integers")
    outside = numbers[(numbers < 0) | (numbers >= len(param))]
    if outside.size:
        raise IndexError(f"{name!r}: rows contains {outside.flat[0]}; expected 0 <= row < {len(param)}")
    return np.asarray(numbers, np.int64, order="C")


def native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype in this machine's byte order."""
    return dtype.newbyteorder("=")

"""Check what a step is given, before anything is changed. Every message names the parameter."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[Any]
"""Any strides and byte order; float16, float32 or float64."""

FLOATS = tuple(np.dtype(name) for name in ("float16", "float32", "float64"))
_EXPECTED_FLOATS = "float16, float32 or float64"


def checked_name(name: object) -> str:
    """Refuse what could be stepped but not saved."""
    if not isinstance(name, str):
        raise TypeError(f"the name {name!r} is a {type(name).__name__}; expected a str")
    try:
        if b"\0" not in name.encode():
            return name
    except UnicodeEncodeError:
        pass
    raise ValueError(f"the name {name!r} has a character that cannot be saved; expected valid Unicode without NUL")


def checked_param(name: str, param: object) -> FloatArray:
    """The parameter as a plain array over the same memory."""
    if not isinstance(param, np.ndarray) or isinstance(param, np.ma.MaskedArray):
        raise TypeError(
            f"{name!r}: the parameter is a {type(param).__name__}; expected a NumPy array, to be updated in place"
        )
    if native(param.dtype) not in FLOATS:
        raise TypeError(f"{name!r}: the parameter has dtype {param.dtype}; expected {_EXPECTED_FLOATS}")
    if not param.flags.writeable:
        raise ValueError(
            f"{name!r}: the parameter is read-only; expected a writable array. If it is a np.memmap, open it with "
            "mode='r+'"
        )
    if _may_overlap_itself(param):
        raise ValueError(
            f"{name!r}: the parameter has strides {param.strides} and shape {param.shape}, so elements may share "
            "memory; expected separate memory for each element"
        )
    return np.asarray(param)


def checked_gradient(name: str, grad: object, shape: tuple[int, ...], param: FloatArray) -> FloatArray:
    """The gradient as an array of this shape."""
    if isinstance(grad, np.ma.MaskedArray):
        raise TypeError(f"{name!r}: the gradient is a MaskedArray, whose mask would be ignored; expected a plain array")
    gradient = np.asarray(grad)
    if native(gradient.dtype) not in FLOATS:
        raise TypeError(f"{name!r}: the gradient has dtype {gradient.dtype}; expected {_EXPECTED_FLOATS}")
    if gradient.shape != shape:
        raise ValueError(
            f"{name!r}: the gradient has shape {gradient.shape}; expected {shape}, "
            f"because the parameter has shape {param.shape}"
        )
    return gradient


def checked_rows(name: str, rows: object, param: FloatArray) -> NDArray[np.int64]:
    """The row numbers, in the shape they came in, all inside the parameter's first axis."""
    if param.ndim == 0:
        raise ValueError(
            f"{name!r}: the parameter has shape (), so it has no rows; expected at least one dimension. "
            "Use step() instead"
        )
    numbers = np.asarray(rows)
    if numbers.size == 0 and not isinstance(rows, np.ndarray):
        numbers = numbers.astype(np.int64)  # an empty list becomes an array of floats
    if numbers.dtype.kind not in "iu":
        raise TypeError(f"{name!r}: rows has dtype {numbers.dtype}; expected integers")
    if numbers.size and not (numbers.min() >= 0 and numbers.max() < len(param)):
        outside = numbers[(numbers < 0) | (numbers >= len(param))]
        raise IndexError(f"{name!r}: rows contains {outside.flat[0]}; expected 0 <= row < {len(param)}")
    return np.ascontiguousarray(numbers, np.int64).reshape(numbers.shape)


def refuse_shared_memory(name: str, param: FloatArray, grad: FloatArray, *, same_allowed: bool) -> None:
    """Writing the parameter must not change a gradient that is still to be read.

    With ``same_allowed`` the gradient may be the parameter itself: each element is read before it is written.
    """
    if not np.may_share_memory(param, grad):
        return
    same = param.ctypes.data == grad.ctypes.data and param.strides == grad.strides and param.dtype == grad.dtype
    if not (same_allowed and same) and _share_memory(param, grad):
        raise ValueError(
            f"{name!r}: the gradient shares memory with the parameter; expected separate memory. Pass a copy"
        )


def native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype in this machine's byte order."""
    return dtype.newbyteorder("=")


def _share_memory(one: FloatArray, other: FloatArray) -> bool:
    work: Any = 1_000_000  # an exact answer may take exponential time
    try:
        return np.shares_memory(one, other, max_work=work)
    except np.exceptions.TooHardError:
        return True


def _may_overlap_itself(array: FloatArray) -> bool:
    """Whether two indices may name the same memory, as in a sliding window."""
    if array.flags.c_contiguous or array.flags.f_contiguous or array.size == 0:
        return False
    reach = array.itemsize
    for stride, length in sorted(
        (abs(stride), length) for stride, length in zip(array.strides, array.shape, strict=True)
    ):
        if length > 1:
            if stride < reach:
                return True
            reach += stride * (length - 1)
    return False

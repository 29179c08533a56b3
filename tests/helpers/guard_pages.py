"""Memory whose neighbours cannot be touched: a read or write one byte too far ends the process."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_LIBC.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_NO_ACCESS = 0
_FAILED = ctypes.c_void_p(-1).value


class Guard:
    """Hands out memory between two pages without access, at the ``edge`` that it is to touch: "start" or "end"."""

    def __init__(self, edge: str) -> None:
        self._edge = edge
        self._mapped: list[tuple[int, int]] = []

    def buffer(self, byte_count: int) -> Any:
        """So many bytes, all of them 0."""
        page = mmap.PAGESIZE
        inside = max(1, -(-byte_count // page)) * page
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        first: int = _LIBC.mmap(None, inside + 2 * page, _NO_ACCESS, flags, -1, 0)
        if first == _FAILED or _LIBC.mprotect(first + page, inside, mmap.PROT_READ | mmap.PROT_WRITE):
            raise OSError(ctypes.get_errno(), "no guarded memory")
        self._mapped.append((first, inside + 2 * page))
        start = first + page + (inside - byte_count if self._edge == "end" else 0)
        return (ctypes.c_char * byte_count).from_address(start)

    def zeros(self, shape: Any, dtype: torch.dtype) -> Tensor:
        """Zeros of this shape."""
        count = torch.Size(shape).numel()
        return torch.frombuffer(self.buffer(count * dtype.itemsize), dtype=dtype).reshape(shape)

    def like(self, tensor: Tensor) -> Tensor:
        """A copy of this tensor."""
        return self.zeros(tensor.shape, tensor.dtype).copy_(tensor.detach())

    def array(self, array: Any) -> Any:
        """A copy of this NumPy array."""
        copied = np.frombuffer(self.buffer(array.nbytes), array.dtype).reshape(array.shape)
        copied[...] = array
        return copied

    def close(self) -> None:
        """Give the memory back; nobody may use it any more."""
        for mapped in self._mapped:
            _LIBC.munmap(*mapped)
        self._mapped.clear()


class GuardedNumpy:
    """NumPy, but what is made empty or of zeros is guarded: for modules that make what kernels get."""

    def __init__(self, guard: Callable[[], Guard]) -> None:
        self._guard = guard

    def zeros(self, shape: Any, dtype: Any = float) -> Any:
        zeros = np.zeros(shape, dtype)
        return self._guard().array(zeros) if zeros.size else zeros

    empty = zeros

    def ones(self, shape: Any, dtype: Any = float) -> Any:
        made = self.zeros(shape, dtype)
        made[...] = 1
        return made

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

"""Steps on memory with inaccessible neighbours: a program, since a mistake would end it.

Each case's name is printed before it runs, so that the last one tells what was wrong. Parameters, states, gradients,
notes of waiting rows, and what the kernels keep between steps lie at the edge of memory that can be touched.
"""

from __future__ import annotations

import copy
import ctypes
import faulthandler
import itertools
import math
import mmap
import os
import resource
import signal
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from rowstep import DeferredAdam, DeferredAdamW, SparseAdam, arrays, clip_grad_norm_
from tests.helpers.deferred_cases import LONG, embedding

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

    def like(self, tensor: Tensor) -> Tensor:
        """A copy of this tensor."""
        copied = torch.frombuffer(self.buffer(tensor.nbytes), dtype=tensor.dtype).reshape(tensor.shape)
        return copied.copy_(tensor.detach())

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


# Any: what these modules have imported is changed below.
compiled: Any = import_module("rowstep._backends.numba")
compiled_arrays: Any = import_module("rowstep.arrays._compiled")
kept_memory: Any = import_module("rowstep._kernels.workspace")
pool: Any = import_module("rowstep._kernels.pool")
pool.Pace.threads = lambda self, most: most
schedules: Any = import_module("rowstep._schedule")
zeros: Any = torch.zeros

ROWS = 41
WIDTHS = range(1, 71) if LONG else (1, 17, 70)
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
ALL_OPTIONS = {
    "amsgrad": True, "bias_correction": "row", "nonfinite": "skip", "weight_decay": 0.1, "maximize": True,
}  # fmt: skip

# Each is a kernel to compile: those that other tests compile too.
MAKERS: dict[str, tuple[Any, dict[str, Any], tuple[torch.dtype, ...]]] = {
    "sparse": (SparseAdam, {}, (F32, F64, BF16)),
    "all of sparse": (SparseAdam, ALL_OPTIONS, (F64,)),
    "by row": (SparseAdam, {"second_moment": "row", "betas": (0.0, 0.9)}, (F64,)),
    "random rounding": (SparseAdam, {"state_dtype": BF16}, (F32,)),
    "deferred": (DeferredAdam, {}, (F32, F64)),
    "decayed": (DeferredAdamW, {"amsgrad": True}, (F64,)),
    "deferred by row": (DeferredAdamW, {"second_moment": "row"}, (F64,)),
}

_guard = Guard("end")


def ids() -> list[Tensor]:
    """Row numbers: the ends of the table, duplicates, one alone, sorted and not."""
    last = ROWS - 1
    return [
        torch.tensor([last, 0, last, 5, 5, 0, last]), torch.tensor([last]), torch.arange(ROWS),
        torch.randint(ROWS, (70,)),
    ]  # fmt: skip


def places(name: str) -> Iterator[None]:
    """Both edges, on one and on two threads."""
    global _guard

    for edge, threads in itertools.product(("end", "start"), (1, 2)):
        torch.set_num_threads(threads)
        pool.PARALLEL_FROM_BYTES = 0
        print(edge, threads, name, flush=True)
        _guard = Guard(edge)
        kept_memory._free.clear()
        yield
        _guard.close()


def guarded(tensor: Tensor) -> Tensor:
    return _guard.like(tensor) if tensor.dim() and tensor.numel() else tensor


def trained(name: str, dtype: torch.dtype, width: int, place: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """All tensors of a table after some steps, with everything where ``place`` puts it."""
    cls, options, _ = MAKERS[name]
    torch.manual_seed(width)
    param = nn.Parameter(place(torch.randn(ROWS, width).to(dtype)))
    optimizer: Any = cls([param], lr=0.1, **options)
    for number, rows in enumerate(ids()):
        if isinstance(optimizer, DeferredAdam):
            optimizer.catch_up(param, place(rows))
        values = place(torch.randn(len(rows), width).to(dtype) * (1e-3 if width % 2 else 1.0))
        param.grad = torch.sparse_coo_tensor(place(rows)[None], values, param.shape, check_invariants=False)
        clip_grad_norm_([param], 1e9, (2.0, math.inf, 3.0, 1.0)[number])
        optimizer.step()
        if number == 0:
            if isinstance(optimizer, DeferredAdam):
                optimizer.flush()
            state = optimizer.state[param]
            state |= {key: place(value) for key, value in state.items() if isinstance(value, Tensor)}
    saved = optimizer.state_dict()["state"][0]
    return [param.detach().clone(), *(torch.as_tensor(value).clone() for value in saved.values())]


def updates() -> None:
    for name, (_, _, dtypes) in MAKERS.items():
        for dtype in dtypes:
            for _ in places(f"{name} {dtype}"):
                for width in WIDTHS if LONG else (1, 70) if torch.get_num_threads() == 1 else (17,):
                    expected = trained(name, dtype, width, torch.clone)
                    torch.zeros = lambda *args, **options: guarded(zeros(*args, **options))
                    try:
                        found = trained(name, dtype, width, guarded)
                    finally:
                        torch.zeros = zeros
                    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def numpy_arrays() -> None:
    for _ in places("arrays"):
        for width, rows in itertools.product(WIDTHS, ids()):
            rng = np.random.default_rng(width)
            operands = [rng.normal(size=(count, width)).astype("float32") for count in (ROWS, ROWS, len(rows))]
            results = []
            for place in (copy.copy, _guard.array):
                param, whole, some = map(place, operands)
                optimizer = arrays.Adam(weight_decay=0.1)
                optimizer.step("a", param, whole)
                optimizer.step_rows("a", param, place(rows.numpy()), some)
                results.append(param)
            assert np.array_equal(*results)


def fake_tensors() -> None:
    """Shapes are all that is asked of a lookup under this mode, and there is no memory behind an address."""
    print("fake tensors", flush=True)
    model = embedding()
    optimizer = DeferredAdam(model)
    for ids in ([1, 2], [3]):
        optimizer.zero_grad()
        model(torch.tensor(ids)).sum().backward()
        optimizer.step()
    real = torch.tensor([5, 1, 3])
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert model(torch.tensor([5, 1, 3])).shape == (3, 3)
        assert model(real).shape == (3, 3)
        optimizer.flush()
    optimizer.flush()
    assert model.weight.isfinite().all()


def overruns() -> None:
    """What no kernel may do ends a process: this shows that the others would be found out."""
    for edge in ("start", "end"):
        memory = Guard(edge).buffer(60)
        beyond = ctypes.addressof(memory) + (60 if edge == "end" else -1)
        child = os.fork()
        if child == 0:
            faulthandler.disable()
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core dump of 200 MB would land in the checkout
            ctypes.string_at(beyond, 1)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV


if __name__ == "__main__":
    overruns()
    fake_tensors()
    kept_memory.np = schedules.np = compiled.np = GuardedNumpy(lambda: _guard)
    updates()
    numpy_arrays()
    print("all held")

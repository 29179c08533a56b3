"""What only a fresh interpreter can measure; `fresh` starts it as a module, with what it is to measure.

Prints one line of JSON.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.contenders import touch_state
from rowstep import SparseAdam

DIM = 64
STEPS = 3  # peaks are taken over these


def first_step() -> float:
    """Seconds from calling the first step to its end; loading or compiling the kernels is part of it."""
    table = nn.Embedding(10_000, DIM, sparse=True)
    optimizer = SparseAdam(table.parameters())
    table(torch.randint(10_000, (8_192,))).square().mean().backward()
    start = time.perf_counter()
    optimizer.step()
    return time.perf_counter() - start


def peak_memory(ids: int, rows: int) -> list[float]:
    """The most memory a step needs beyond what there was before it, in bytes per id: rowstep's, then torch's."""
    return [_peak(SparseAdam, ids, rows) / ids, _peak(torch.optim.SparseAdam, ids, rows) / ids]


def _peak(kind: Callable[[list[nn.Parameter]], torch.optim.Optimizer], ids: int, rows: int) -> int:
    table = nn.Parameter(torch.ones(rows, DIM))
    optimizer = kind([table])
    # Compiles. The batch is small, so that workspace which is kept for the next step shows when that step needs more.
    _give(table, ids // 8)
    optimizer.step()
    touch_state(optimizer)  # pages that nobody has written yet are not the step's to answer for
    extra = []
    for _ in range(STEPS):
        _give(table, ids)
        _release_free_memory()
        _reset_peak()
        before = _status("VmRSS")
        optimizer.step()
        extra.append(_status("VmHWM") - before)
    return max(extra)


def _give(table: nn.Parameter, ids: int) -> None:
    rows = torch.randint(len(table), (1, ids))
    table.grad = torch.sparse_coo_tensor(rows, torch.randn(ids, DIM), table.shape, check_invariants=False)


def _release_free_memory() -> None:
    """Hand freed memory back to the system, which would otherwise be there for the step to use unseen."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def _reset_peak() -> None:
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def _status(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    with open("/proc/self/status") as file:
        lines = dict(line.split(":", 1) for line in file)
    return int(lines[field].split()[0]) * 1024


def measure(what: str, *arguments: str) -> float | list[float]:
    return first_step() if what == "first-step" else peak_memory(*map(int, arguments))


if __name__ == "__main__":
    print(json.dumps(measure(*sys.argv[1:])))

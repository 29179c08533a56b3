"""Measurements that need an interpreter of their own: the first step's time, and a step's peak memory."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.contenders import touch_state
from benchmarks.timing import watch
from rowstep import SparseAdam

ROOT = Path(__file__).parents[2]  # where `benchmarks` can be imported, whatever the current directory
DIM = 64
STEPS = 3  # peaks are taken over these


def first_step() -> dict[str, float]:
    """Seconds with kernels compiled and with kernels loaded, and the share of the machine that other work took."""
    with tempfile.TemporaryDirectory() as cache, watch() as load:
        cold, cached = (in_fresh_interpreter(seconds_of_first_step, NUMBA_CACHE_DIR=cache) for _ in range(2))
    return {"cold": cold, "cached": cached, "others": load.others}


def peak_memory(rows: Sequence[int], ids: int) -> list[dict[str, float]]:
    """In bytes per id; nothing where the system cannot tell: resetting the peak is Linux's alone."""
    if not sys.platform.startswith("linux"):
        return []
    # A process for each: workspace that is kept for the next step must not serve the next table.
    return [{"rows": count, **in_fresh_interpreter(peaks, ids, count)} for count in rows]


def in_fresh_interpreter(
    function: Callable[..., object], *arguments: object, group: Path | None = None, **environment: str
) -> Any:
    """What a function returns there, in a control group if there is one; all that passes is JSON."""
    program = (
        "import importlib, json, sys; module, name, given = sys.argv[1:]; "
        "print(json.dumps(getattr(importlib.import_module(module), name)(*json.loads(given))))"
    )
    command = [sys.executable, "-c", program, function.__module__, function.__name__, json.dumps(arguments)]
    if group is not None:
        command = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs"), *command]
    env = os.environ | environment
    done = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(done.stdout)


# In the fresh interpreter


def seconds_of_first_step() -> float:
    """Seconds from calling the first step to its end; loading or compiling the kernels is part of it."""
    table = nn.Embedding(10_000, DIM, sparse=True)
    optimizer = SparseAdam(table.parameters())
    table(torch.randint(10_000, (8_192,))).square().mean().backward()
    start = time.perf_counter()
    optimizer.step()
    return time.perf_counter() - start


def peaks(ids: int, rows: int) -> dict[str, float]:
    kinds = {"rowstep": SparseAdam, "torch": torch.optim.SparseAdam}
    return {name: _peak(kind, ids, rows) / ids for name, kind in kinds.items()}


def _peak(kind: Callable[[list[nn.Parameter]], torch.optim.Optimizer], ids: int, rows: int) -> int:
    """The most memory a step needs beyond what there was before it."""
    table = nn.Parameter(torch.ones(rows, DIM))
    optimizer = kind([table])
    # Compiles. The batch is small, so that workspace which is kept for the next step shows when that step needs more.
    _give(table, ids // 8)
    optimizer.step()
    touch_state(optimizer)  # pages that nobody has written yet are not the step's to answer for
    extra = []
    for _ in range(STEPS):
        _give(table, ids)
        # Freed memory goes back to the system: it would otherwise be there for the step to use unseen.
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = status("VmRSS")
        optimizer.step()
        extra.append(status("VmHWM") - before)
    return max(extra)


def _give(table: nn.Parameter, ids: int) -> None:
    rows = torch.randint(len(table), (1, ids))
    table.grad = torch.sparse_coo_tensor(rows, torch.randn(ids, DIM), table.shape, check_invariants=False)


def status(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0]) * 1024

"""`rowstep warm-up`: compile the usual kernels now, so that no first step has to.

The kernels are compiled as every program compiles them: by short trainings that need them. So they land where a program
will look, and nothing here knows their names.
"""

from __future__ import annotations

import argparse
import os
import time
import warnings

import torch
from torch import nn

from rowstep.cli.extras import CommandError

_OPTIMIZERS = ("SparseAdam", "DeferredAdam", "DeferredAdamW")
_COLUMNS, _STEPS = 64, 3  # from the second step on, rows have waited and catch up


def run(arguments: argparse.Namespace) -> int:
    _require_compiler()
    import llvmlite.binding
    import numba

    from rowstep._kernels import cache

    print("Compiling takes seconds for each dtype; what was compiled before is only loaded.", flush=True)
    start, first = time.perf_counter(), len(cache.records)
    for dtype in dict.fromkeys(arguments.dtype or ["float32"]):
        for name in _OPTIMIZERS:
            begun = time.perf_counter()
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "rowstep cannot cache", RuntimeWarning)  # said below
                train(name, getattr(torch, dtype))
            if unsaved := [record.trouble for record in cache.records[first:] if record.path is None]:
                raise CommandError(
                    f"compiled kernels cannot be saved, so every process will compile its own: {unsaved[0]}. "
                    "Set NUMBA_CACHE_DIR to a writable directory, here and for the programs that should find them"
                )
            print(f"{name:<14}{dtype:<10}{time.perf_counter() - begun:6.1f} s", flush=True)
    paths = {record.path for record in cache.records[first:] if record.path is not None}
    if not paths:
        raise CommandError(
            "the installed Numba did not ask for kernels on disk, so every process will compile its own. "
            "Install a version of Numba that this version of rowstep was tested with"
        )
    size, folders = sum(path.stat().st_size for path in paths), {str(path.parent.resolve()) for path in paths}
    print(f"{len(paths)} kernels, {size / 1e6:.1f} MB, in {', '.join(sorted(folders))}")
    cpu = numba.config.CPU_NAME or llvmlite.binding.get_host_cpu_name()  # type: ignore[attr-defined]
    done = f"Done in {time.perf_counter() - start:.1f} s"
    print(f"{done}. These kernels are for the CPU {cpu}; on another, the first step compiles its own.")
    return 0


def train(name: str, dtype: torch.dtype) -> None:
    """Train a table of this dtype with this optimizer, on one thread and on two, so that every usual kernel runs."""
    import rowstep
    from rowstep._kernels.pool import PARALLEL_FROM_BYTES

    # A gradient that is large enough for threads, over a table of which a part waits.
    ids = 2 * PARALLEL_FROM_BYTES // (_COLUMNS * dtype.itemsize)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        table = nn.Embedding(2 * ids, _COLUMNS, sparse=True, dtype=dtype)
        optimizer: torch.optim.Optimizer = getattr(rowstep, name)(table.parameters())
        for step in range(_STEPS):
            optimizer.zero_grad()
            torch.autograd.backward(table(torch.arange(ids) + step).float().sum())
            rowstep.clip_grad_norm_(table.parameters(), 1.0)
            optimizer.step()
        optimizer.state_dict()  # every row catches up


def _require_compiler() -> None:
    try:
        import numba
    except ImportError as error:
        raise CommandError(f"Numba cannot be imported ({error}), so there is nothing to compile. Install it") from None
    backend = os.environ.get("ROWSTEP_BACKEND") or "numba"
    if backend != "numba" or numba.config.DISABLE_JIT:  # type: ignore[attr-defined]
        found = "NUMBA_DISABLE_JIT is set" if backend == "numba" else f"ROWSTEP_BACKEND is {backend!r}"
        raise CommandError(f"{found}, so there is nothing to compile; expected neither. Unset it")

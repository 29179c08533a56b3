"""`rowstep warm-up`: compile the usual kernels now, so that no first step has to.

A container starts without a cache unless its image has one. The kernels are compiled as every program compiles them: by
short trainings that need them. So they land where a program will look, and nothing here knows their names.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rowstep._kernels.cache import Record

ABOUT = "compile the usual kernels ahead, for container images: the first step then loads them"

_OPTIMIZERS = ("SparseAdam", "DeferredAdam", "DeferredAdamW")

_DETAILS = """\
Compiles what the three optimizers need with their default options, on one and on several threads, and what
clip_grad_norm_ needs. For other options, run a few steps of your own program instead: it fills the same cache.

The kernels are for the CPU that this runs on, and for this version of Python, Numba and rowstep. On another CPU the
first step compiles its own. They are kept in the package's own folder, or in the user's cache folder if that cannot be
written, or where NUMBA_CACHE_DIR says, which must then say the same to the programs that should find them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog, parser.formatter_class = _DETAILS, argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--dtype",
        nargs="+",
        action="extend",
        choices=["float32", "float64", "bfloat16", "float16"],
        help="dtypes of the tables (default: float32)",
    )


def run(arguments: argparse.Namespace) -> int:
    if trouble := _obstacle():
        return _failed(trouble)
    import torch

    from rowstep._kernels import cache
    from rowstep.cli._warm_up import training

    start, first = time.perf_counter(), len(cache.records)
    for dtype in dict.fromkeys(arguments.dtype or ["float32"]):
        for name in _OPTIMIZERS:
            begun, before = time.perf_counter(), len(cache.records)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "rowstep cannot cache", RuntimeWarning)  # said below
                training.run(name, getattr(torch, dtype))
            found = cache.records[before:]
            if trouble := _trouble(found, cache.records[first:]):
                return _failed(trouble)
            print(f"{name:<14}{dtype:<10}{_counted(found):<24}{time.perf_counter() - begun:6.1f} s", flush=True)
    _show_folders(cache.records[first:], time.perf_counter() - start)
    return 0


def _obstacle() -> str:
    """Why no kernel will run at all."""
    try:
        import numba
    except ImportError as error:
        return f"Numba cannot be imported ({error}), so there is nothing to compile. Install Numba"
    config: Any = numba.config
    if os.environ.get("ROWSTEP_BACKEND") == "reference":
        return "ROWSTEP_BACKEND is 'reference', which compiles nothing; expected 'numba', or no such variable. Unset it"
    if config.DISABLE_JIT:
        return "NUMBA_DISABLE_JIT=1 disables Numba's compiler, so there is nothing to compile. Unset it"
    return ""


def _trouble(found: list[Record], all_found: list[Record]) -> str:
    """Why the next process will have to compile what these trainings needed."""
    for record in found:
        if record.path is None:
            return (
                f"compiled kernels cannot be saved, so every process will compile its own: {record.trouble}. "
                "Set NUMBA_CACHE_DIR to a writable directory, here and for the programs that should find them"
            )
    if not any(record.name.endswith("on_pool") for record in all_found):
        return (
            "the installed Numba did not ask for kernels on disk, so every process will compile its own. "
            "Install a version of Numba that this version of rowstep was tested with"
        )
    return ""


def _counted(found: list[Record]) -> str:
    loaded = sum(record.was_loaded for record in found)
    return f"{len(found) - loaded} compiled, {loaded} loaded"


def _show_folders(found: list[Record], seconds: float) -> None:
    import llvmlite.binding
    import numba

    paths = {record.path for record in found if record.path is not None}
    for folder in sorted({path.parent for path in paths}):
        inside = [path for path in paths if path.parent == folder]
        megabytes = sum(path.stat().st_size for path in inside) / 1e6
        print(f"{len(inside)} kernels, {megabytes:.1f} MB, in {folder.resolve()}")
    config: Any = numba.config
    cpu = config.CPU_NAME or llvmlite.binding.get_host_cpu_name()
    print(f"Done in {seconds:.1f} s. These kernels are for the CPU {cpu}; on another, the first step compiles its own.")


def _failed(trouble: str) -> int:
    print(f"rowstep warm-up: {trouble}", file=sys.stderr)
    return 1

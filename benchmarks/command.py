"""Running a suite from the command line: choose its parts, run them, write down what they measured."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks import report
from benchmarks.contenders import DisagreementError
from benchmarks.deferred import DeferredSuite
from benchmarks.distributed import DistributedSuite
from benchmarks.gpu import GpuSuite
from benchmarks.host import HostSuite
from benchmarks.memory import MemorySuite
from benchmarks.peers.environments import MissingError
from benchmarks.peers.suite import PeersSuite
from benchmarks.quality import QualitySuite
from benchmarks.quality.interactions import DataError
from benchmarks.quality.lazy import LazySuite
from benchmarks.rows import RowsSuite
from benchmarks.sparse import SparseSuite
from benchmarks.suite import Suite, table_of_bars
from rowstep.cli.extras import positive
from tests.helpers.ranks import RankError

SUITES: dict[str, type[Suite]] = {
    "sparse": SparseSuite,
    "deferred": DeferredSuite,
    "rows": RowsSuite,
    "distributed": DistributedSuite,
    "host": HostSuite,
    "memory": MemorySuite,
    "gpu": GpuSuite,
    "peers": PeersSuite,
    "quality": QualitySuite,
    "lazy": LazySuite,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one suite and return its exit code; argparse itself exits with 2 on arguments it does not know."""
    given = sys.argv[1:] if argv is None else list(argv)
    arguments = _parser().parse_args(given, argparse.Namespace(given=given))
    kind = SUITES[arguments.suite]
    if arguments.threads and kind.own_threads:
        return _fail(2, f"{arguments.suite} {kind.own_threads} and takes no --threads")
    if reason := kind.unavailable():
        print(reason)
        return 0
    threads = arguments.threads or sorted({1, torch.get_num_threads()})
    repeats = arguments.repeats or (kind.quick_repeats if arguments.quick else kind.usual_repeats)
    suite = kind(quick=arguments.quick, threads=threads, repeats=repeats, data=arguments.data)
    try:
        return _run_parts(suite, arguments, report.console())
    finally:
        suite.close()


def _parser() -> argparse.ArgumentParser:
    about = "Time a step against torch's optimizers and the machine's memory, or see what it learns."
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=about)
    suites = (
        "SparseAdam (default), DeferredAdam, both by rows of the table, sharded tables, tables in files, kinds of "
        "state, a GPU, other packages, what models learn with less state, or what they learn if only rows with a "
        "gradient move"
    )
    parser.add_argument("suite", nargs="?", choices=SUITES, default="sparse", help=suites)
    parser.add_argument("--only", nargs="+", metavar="PART", help="parts of the suite, such as zipf-1m or flush")
    threads = "thread counts (default: one, and all cores; not for distributed, gpu, quality, lazy)"
    parser.add_argument("--threads", nargs="+", type=positive, help=threads)
    repeats = "rounds of a measurement, at least (default: 25, quick: 5); of quality and lazy: seeds"
    parser.add_argument("--repeats", type=positive, help=repeats)
    parser.add_argument("--quick", action="store_true", help="small tables: to see that it works, not what it costs")
    parser.add_argument("--data", type=Path, help="RecBole's wheel, for quality and lazy (default: pip downloads it)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="where the JSON file goes (default: out)")
    return parser


def _fail(code: int, message: str) -> int:
    print(f"benchmarks: {message}", file=sys.stderr)
    return code


def _run_parts(suite: Suite, arguments: argparse.Namespace, console: Console) -> int:
    parts = list(suite.parts())
    names = [part.name for part in parts]
    if unknown := [name for name in arguments.only or () if name not in names]:
        return _fail(2, f"no part is called {', '.join(unknown)}; there are {', '.join(names)}")

    try:
        for part in parts:
            if not arguments.only or part.name in arguments.only:
                with console.status(f"measuring {part.name}"):
                    part.run()
    except (DataError, DisagreementError, MissingError, RankError) as error:
        return _fail(1, str(error))
    _write(suite, arguments, console)
    return 0


def _write(suite: Suite, arguments: argparse.Namespace, console: Console) -> None:
    bars = [] if suite.quick else suite.bars
    for table in suite.tables():
        console.print(table if isinstance(table, str) else table.table(), soft_wrap=isinstance(table, str))
    if bars:
        console.print(table_of_bars(bars).table())
    if disturbed := [measured.others for measured in suite.measurements if measured.disturbed]:
        console.print(
            f"[red]* Other work took up to {max(disturbed):.0%} of the machine during {len(disturbed)} of "
            f"{len(suite.measurements)} measurements: measure these again.[/red]"
        )
    document = {
        "command": shlex.join(["python", "-m", "benchmarks", *arguments.given]),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "threads": list(suite.threads),
        "quick": suite.quick,
        "machine": machine(),
        "measurements": [measured.as_json() for measured in suite.measurements],
        **suite.findings,
        "bars": [bar._asdict() | {"met": bar.met} for bar in bars],
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    written = arguments.out / f"{suite.file}.json"
    written.write_text(json.dumps(document, separators=(",", ":")) + "\n")
    console.print("Written:", written, soft_wrap=True)


def machine() -> dict[str, Any]:
    """Which machine and which versions a run was measured with."""
    return {
        "cpu": _cpu("model name") or platform.processor() or platform.machine(),
        "cpu_flags": _cpu("flags"),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "backend": os.environ.get("ROWSTEP_BACKEND", "default"),
        **{package: version(package) for package in ("rowstep", "torch", "numba", "numpy")},
    }


def _cpu(about: str) -> str:
    """What Linux says about the processor; nothing elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(about)), "")

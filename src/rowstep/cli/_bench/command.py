"""Running a suite from the command line: choose its parts, run them, write down what they measured."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch

from rowstep.cli._bench import report
from rowstep.cli._bench.contenders import DisagreementError
from rowstep.cli._bench.deferred import DeferredSuite
from rowstep.cli._bench.distributed import DistributedSuite
from rowstep.cli._bench.machine import machine
from rowstep.cli._bench.ranks import RankError
from rowstep.cli._bench.sparse import SparseSuite
from rowstep.cli._bench.suite import Suite

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console

SUITES: dict[str, type[Suite]] = {
    "sparse": SparseSuite,
    "deferred": DeferredSuite,
    "distributed": DistributedSuite,
}


def run(arguments: argparse.Namespace, console: Console, figure: Figure) -> int:
    threads = arguments.threads or sorted({1, torch.get_num_threads()})
    repeats = arguments.repeats or (5 if arguments.quick else 25)
    kind = SUITES[arguments.suite]
    if arguments.threads and not kind.takes_threads:
        print(f"rowstep bench: {arguments.suite} has one thread per rank and takes no --threads", file=sys.stderr)
        return 2
    suite = kind(quick=arguments.quick, threads=threads, repeats=repeats)
    try:
        return _run(suite, arguments, console, figure)
    finally:
        suite.close()


def _run(suite: Suite, arguments: argparse.Namespace, console: Console, figure: Figure) -> int:
    parts = list(suite.parts())
    names = [part.name for part in parts]
    if unknown := [name for name in arguments.only or () if name not in names]:
        print(f"rowstep bench: no part is called {', '.join(unknown)}; there are {', '.join(names)}", file=sys.stderr)
        return 2

    try:
        for part in parts:
            if not arguments.only or part.name in arguments.only:
                with console.status(f"measuring {part.name}"):
                    part.run()
    except (DisagreementError, RankError) as error:
        print(f"rowstep bench: {error}", file=sys.stderr)
        return 1
    _write(suite, arguments, console, figure)
    return 0


def _write(suite: Suite, arguments: argparse.Namespace, console: Console, figure: Figure) -> None:
    # The bars are set for the full sizes.
    reached = [] if suite.quick else list(suite.bars())
    suite.show(console)
    report.show_bars(console, reached, suite.measurements)
    document = {
        "command": shlex.join(["rowstep", *arguments.given]),
        "quick": suite.quick,
        "machine": machine(),
        "measurements": [measured.as_json() for measured in suite.measurements],
        **suite.findings(),
        "bars": [asdict(bar) | {"met": bar.met} for bar in reached],
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    written = [arguments.out / f"{suite.file}.json"]
    written[0].write_text(json.dumps(document, indent=1) + "\n")
    if suite.draw(figure):
        written.append(arguments.out / f"{suite.file}.png")
        figure.savefig(written[-1])
    console.print("Written:", *written, soft_wrap=True)

"""Running a suite from the command line: choose its parts, run them, write down what they measured."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rowstep.cli._bench import cases, plot, report, sparse
from rowstep.cli._bench.bars import bars
from rowstep.cli._bench.contenders import DisagreementError
from rowstep.cli._bench.results import Results

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console

SUITES = {"sparse": sparse.parts}


def run(arguments: argparse.Namespace, console: Console, figure: Figure) -> int:
    threads = arguments.threads or sorted({1, torch.get_num_threads()})
    sizes = cases.QUICK if arguments.quick else cases.FULL
    parts = list(SUITES[arguments.suite](sizes, threads, arguments.repeats))
    names = [part.name for part in parts]
    if unknown := [name for name in arguments.only or () if name not in names]:
        print(f"rowstep bench: no part is called {', '.join(unknown)}; there are {', '.join(names)}", file=sys.stderr)
        return 2

    results = Results(shlex.join(["rowstep", *arguments.given]), arguments.quick)
    try:
        for part in parts:
            if not arguments.only or part.name in arguments.only:
                with console.status(f"measuring {part.name}"):
                    part.run(results)
    except DisagreementError as error:
        print(f"rowstep bench: {error}", file=sys.stderr)
        return 1
    _write(results, arguments.out, console, figure)
    return 0


def _write(results: Results, folder: Path, console: Console, figure: Figure) -> None:
    reached = bars(results)
    report.show(console, results, reached)
    folder.mkdir(parents=True, exist_ok=True)
    document = results.as_json() | {"bars": [asdict(bar) | {"met": bar.met} for bar in reached]}
    path = folder / "bench.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    written = [path]
    if steps := results.of_kind("step"):
        plot.draw_steps(figure, steps)
        written.append(folder / "bench.png")
        figure.savefig(written[-1])
    console.print("Written:", *written, soft_wrap=True)

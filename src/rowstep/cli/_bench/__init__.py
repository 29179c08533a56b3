"""`rowstep bench`: a step of rowstep's optimizers beside torch's, on the user's machine, in about a minute.

The rest of the measurements, with plots and what each should reach, is in `benchmarks/` in the repository.
"""

from __future__ import annotations

import argparse
import sys

from rowstep.cli import extras
from rowstep.cli.arguments import positive

ABOUT = "time a step beside torch's optimizers, in about a minute; needs 3 GB of memory"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", nargs="+", type=positive, help="thread counts (default: one, and all cores)")
    parser.add_argument("--seconds", type=float, default=3, help="how long each line is measured (default: 3)")
    parser.add_argument("--quick", action="store_true", help="the smallest table only: to see that it works")


def run(arguments: argparse.Namespace) -> int:
    console = extras.console()

    import torch

    from rowstep.cli._bench import measure, pairs, report

    threads = arguments.threads or sorted({1, torch.get_num_threads()})
    sizes = measure.SIZES[:1] if arguments.quick else measure.SIZES
    try:
        lines = list(measure.lines(threads, arguments.seconds, sizes, console))
    except pairs.DisagreementError as error:
        print(f"rowstep bench: {error}", file=sys.stderr)
        return 1
    console.print(report.table(lines))
    return 0

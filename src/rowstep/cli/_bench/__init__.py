"""`rowstep bench [suite]`: what a step costs, next to torch's optimizers and to the bare movement of its bytes.

Run it on an idle machine. Contenders of one case take turns in one process, on the same gradients, after a check that
they compute the same; what was measured goes to a JSON file with the machine it was measured on.

A suite is a package with a subclass of `suite.Suite`, which `command.SUITES` knows by its name.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rowstep.cli import _extras
from rowstep.cli._numbers import positive

ABOUT = "time a step against torch's optimizers and the machine's memory"
# What each of them measures is in `command`, which `--help` need not import.
SUITES = ("sparse", "deferred", "distributed")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "suite",
        nargs="?",
        choices=SUITES,
        default=SUITES[0],
        help="SparseAdam (default), DeferredAdam, or sharded tables",
    )
    parser.add_argument("--only", nargs="+", metavar="PART", help="parts of the suite, such as zipf-1m, loop or flush")
    parser.add_argument(
        "--threads", nargs="+", type=positive, help="thread counts (default: one, and all cores; not for distributed)"
    )
    parser.add_argument("--repeats", type=positive, help="rounds of a measurement, at least (default: 25, quick: 5)")
    parser.add_argument("--quick", action="store_true", help="small tables: to see that it works, not what it costs")
    parser.add_argument("--out", type=Path, default=Path("out"), help="where JSON and plot go (default: out)")


def run(arguments: argparse.Namespace) -> int:
    console, figure = _extras.console(), _extras.figure(10, 7)
    from rowstep.cli._bench import command  # imports torch and Numba: not for `--help`

    return command.run(arguments, console, figure)

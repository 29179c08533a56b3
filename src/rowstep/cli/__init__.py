"""The command line: `rowstep demo` compares optimizers, `rowstep warm-up` compiles kernels ahead of time.

Each command is a module with `run(arguments) -> exit code`, imported when the command runs: `rowstep --version` does
not wait for torch.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence

from rowstep import __version__
from rowstep.cli.extras import CommandError, number, positive

_WARM_UP_DETAILS = """\
For the default options of the optimizers and for clip_grad_norm_, on one and on several threads. For other options run
a few steps of your own program: it fills the same cache. The kernels are for this CPU and these versions of Python,
Numba and rowstep. NUMBA_CACHE_DIR says where they go; programs that should find them need the same setting."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; argparse itself exits with 2 on arguments it does not know."""
    arguments = _parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # not every encoding has the characters of the bars
    try:
        code: int = importlib.import_module(f"rowstep.cli.{arguments.module}").run(arguments)
        return code
    except ModuleNotFoundError as error:
        flaw = f"needs {error.name}, which is not installed: pip install {error.name}"
    except (CommandError, ImportError) as error:  # such as that of a torch that is too old
        flaw = str(error)
    except OSError as error:
        flaw = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    print(f"rowstep: {flaw}", file=sys.stderr)
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rowstep", description="Adam for embedding tables.")
    parser.add_argument("--version", action="version", version=f"rowstep {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")

    def command(name: str, about: str, example: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=about, description=about, epilog=f"Example: rowstep {name} {example}")
        added.set_defaults(module=f"_{name.replace('-', '_')}")
        return added

    about = "train a table of a million rows with torch's optimizers and with rowstep's, in a minute; needs 2 GB"
    demo = command("demo", about, "--seconds 4")
    seconds = number(float, "a finite number above 0")
    cores = os.cpu_count() or 1
    threads = number(int, f"a whole number from 1 to {cores}, the cores of this machine", cores)
    demo.add_argument("--steps", type=positive, default=300, help="steps of each optimizer (default: 300)")
    demo.add_argument("--seconds", type=seconds, default=8, help="time for each optimizer (default: 8)")
    demo.add_argument("--threads", type=threads, default=1, help="threads of torch and rowstep (default: 1)")

    about = "compile the usual kernels ahead, for container images: the first step loads them"
    warm_up = command("warm-up", about, "--dtype float32 bfloat16")
    warm_up.description = f"{about}. {_WARM_UP_DETAILS}"
    dtypes, about = ["float32", "float64", "bfloat16"], "dtypes of the tables (default: float32)"
    warm_up.add_argument("--dtype", nargs="+", action="extend", choices=dtypes, help=about)
    return parser

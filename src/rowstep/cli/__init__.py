"""The command line: `rowstep demo` compares optimizers, `rowstep inspect` shows what a checkpoint holds, `rowstep
warm-up` compiles kernels ahead of time.

Each command is a module with `run(arguments) -> exit code`, imported when the command runs: `rowstep --version` does
not wait for torch.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rowstep import __version__
from rowstep.cli.extras import CommandError, number, positive, printable

_WARM_UP_DETAILS = """\
For the default options of the optimizers and for clip_grad_norm_, on one and on several threads. For other options run
a few steps of your own program: it fills the same cache. The kernels are for this CPU and these versions of Python,
Numba and rowstep. NUMBA_CACHE_DIR says where they go; programs that should find them need the same setting."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; argparse itself exits with 2 on arguments it does not know."""
    arguments = _parser().parse_args(argv)
    if sys.stderr is None:  # it was closed, and progress needs somewhere to go
        sys.stderr = io.StringIO()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # not every encoding has the characters of bars and of names in files
    try:
        code: int = importlib.import_module(f"rowstep.cli.{arguments.module}").run(arguments)
        print(end="", flush=True)  # a closed pipe or a full disk shows here, not when the interpreter ends
        return code
    except ModuleNotFoundError as error:
        return _failed(f"needs {error.name}, which is not installed: pip install {error.name}")
    except (CommandError, ImportError) as error:  # such as that of a torch that is too old
        return _failed(str(error))
    except OSError as error:
        if error.filename is not None:
            return _failed(f"{error.filename}: {error.strerror}")
        with contextlib.suppress(OSError):  # what is still to be written would raise again when the interpreter ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _failed(f"the output ended before all of it was written: {error.strerror or error}")


def _failed(sentence: str) -> int:
    print(f"rowstep: {printable(sentence, 1000)}", file=sys.stderr)
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

    about = "show what a checkpoint holds: weights, optimizer state, rows never touched"
    inspect = command("inspect", about, "checkpoint.pt")
    inspect.add_argument("path", type=Path, help="a torch.save file, a .safetensors or a .npz")

    about = "compile the usual kernels ahead, for container images: the first step loads them"
    warm_up = command("warm-up", about, "--dtype float32 bfloat16")
    warm_up.description = f"{about}. {_WARM_UP_DETAILS}"
    dtypes, about = ["float32", "float64", "bfloat16"], "dtypes of the tables (default: float32)"
    warm_up.add_argument("--dtype", nargs="+", action="extend", choices=dtypes, help=about)
    return parser

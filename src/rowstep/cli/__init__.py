"""The command line: `rowstep demo` shows the optimizer at work, `rowstep bench` times it, `rowstep inspect` shows
what a checkpoint holds, `rowstep warm-up` compiles kernels ahead of time.

Each command is a module with `run(arguments) -> exit code`, imported when the command runs: `rowstep --version` does
not wait for torch. `demo` and `bench` draw with rich, which comes with the extra `cli`; nothing else needs it.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rowstep import __version__
from rowstep.cli.extras import CommandError, positive, printable

_WARM_UP_DETAILS = """\
For the default options of the optimizers and for clip_grad_norm_, on one and on several threads. For other options run
a few steps of your own program: it fills the same cache. The kernels are for this CPU and these versions of Python,
Numba and rowstep. NUMBA_CACHE_DIR says where they go; programs that should find them need the same setting."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; argparse itself exits with 2 on arguments it does not know."""
    arguments = _parser().parse_args(argv)
    try:
        code: int = importlib.import_module(f"rowstep.cli.{arguments.module}").run(arguments)
        sys.stdout.flush()  # a closed pipe shows here, not when the interpreter ends
        return code
    except KeyboardInterrupt:
        return _failed("interrupted", 130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains when it flushes
        return _failed("the output was closed before all of it was written")
    except CommandError as error:
        return _failed(str(error))
    except OSError as error:
        return _failed(f"{error.filename}: {error.strerror}" if error.filename else str(error))


def _failed(sentence: str, code: int = 1) -> int:
    print(f"rowstep: {printable(sentence, 1000)}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rowstep", description="Adam for embedding tables.")
    parser.add_argument("--version", action="version", version=f"rowstep {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")

    def command(name: str, about: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=about, description=about)
        added.set_defaults(module=f"_{name.replace('-', '_')}")
        return added

    demo = command("demo", "train word vectors on Python's manual with rowstep and with torch, side by side")
    demo.add_argument("--steps", type=positive, default=800, help="training steps (default: 800)")
    demo.add_argument("--seconds", type=float, default=45, help="stop training after this long (default: 45)")

    bench = command("bench", "time a step beside torch's optimizers, in about a minute; needs 3 GB of memory")
    bench.add_argument("--threads", nargs="+", type=positive, help="thread counts (default: one, and all cores)")
    bench.add_argument("--seconds", type=float, default=3, help="how long each line is measured (default: 3)")
    bench.add_argument("--quick", action="store_true", help="the smallest table only: to see that it works")

    inspect = command("inspect", "show what a checkpoint holds: weights, optimizer state, rows never touched")
    kinds = "a torch.save file, a .safetensors, a .npz or a torch.distributed.checkpoint directory"
    inspect.add_argument("path", type=Path, help=kinds)
    trust = "read a directory, which torch unpickles: this can run code from it"
    inspect.add_argument("--trust", action="store_true", help=trust)

    warm_up = command("warm-up", "compile the usual kernels ahead, for container images: the first step loads them")
    warm_up.epilog = _WARM_UP_DETAILS
    dtypes, about = ["float32", "float64", "bfloat16"], "dtypes of the tables (default: float32)"
    warm_up.add_argument("--dtype", nargs="+", action="extend", choices=dtypes, help=about)
    return parser

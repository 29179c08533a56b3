"""The command line: `rowstep demo` shows the optimizer at work, `rowstep bench` times it, `rowstep inspect` shows
what a checkpoint holds, `rowstep warm-up` compiles kernels ahead.

Each command is a package with `ABOUT`, `add_arguments(parser)` and `run(arguments) -> exit code`. The first three draw
with rich and matplotlib, which come with the extra `cli`; nothing else in rowstep needs them. Nothing heavy is imported
before a command runs: `rowstep --version` does not wait for torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rowstep import __version__
from rowstep.cli import _bench, _demo, _inspect, _warm_up
from rowstep.cli.extras import MissingExtraError

_COMMANDS = {"demo": _demo, "bench": _bench, "inspect": _inspect, "warm-up": _warm_up}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; argparse itself exits with 2 on arguments it does not know."""
    arguments = _parser().parse_args(argv)
    try:
        code: int = _COMMANDS[arguments.command].run(arguments)
        return code
    except MissingExtraError as error:
        print(f"rowstep: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rowstep", description="Adam for embedding tables.")
    parser.add_argument("--version", action="version", version=f"rowstep {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, command in _COMMANDS.items():
        about = command.ABOUT
        command.add_arguments(commands.add_parser(name, help=about, description=about))
    return parser

"""Whether a command that the docs name exists: its target, its subcommand, its arguments. Nothing is run."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Sequence

from benchmarks import command as benchmarks_command
from rowstep import cli
from tests.helpers.doc_blocks import ROOT


class UnknownCommandError(Exception):
    """What is wrong with the command."""


def check(words: Sequence[str]) -> None:
    """Raise if the command does not exist, or does not take these arguments."""
    program, *rest = words
    if program not in _CHECKS:
        raise UnknownCommandError(f"nobody knows how to check {program!r}: add it to tests/helpers/doc_commands.py")
    try:
        _CHECKS[program](rest)
    except SystemExit:
        raise UnknownCommandError(f"{' '.join(words)!r} is refused") from None


def _make(targets: list[str]) -> None:
    known = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for target in targets:
        if target not in known:
            raise UnknownCommandError(f"the Makefile has no target {target!r}")


def _pip(arguments: list[str]) -> None:
    pyproject, pins = (ROOT / "pyproject.toml").read_text(), (ROOT / "constraints.txt").read_text().splitlines()
    for argument in arguments[1:]:
        if "==" in argument and argument not in pins:
            raise UnknownCommandError(f"constraints.txt does not have {argument!r}")
        for extra in re.findall(r"(?:^\.|rowstep)\[([\w,]+)\]", argument):
            for name in extra.split(","):
                if not re.search(rf"^{name} = \[", pyproject, re.MULTILINE):
                    raise UnknownCommandError(f"pyproject.toml has no extra {name!r}")


def _git(arguments: list[str]) -> None:
    if f'Homepage = "{arguments[-1]}"' not in (ROOT / "pyproject.toml").read_text():
        raise UnknownCommandError(f"pyproject.toml has no such homepage as {arguments[-1]!r}")


def _rowstep(arguments: list[str]) -> None:
    cli._parser().parse_args(arguments)


def _python(arguments: list[str]) -> None:
    if arguments[:2] == ["-m", "benchmarks"]:
        _benchmarks(arguments[2:])
    elif arguments[0] == "-m":
        if importlib.util.find_spec(arguments[1]) is None:
            raise UnknownCommandError(f"there is no module {arguments[1]!r}")
    elif not (ROOT / arguments[0]).is_file():
        raise UnknownCommandError(f"there is no file {arguments[0]!r}")


def _benchmarks(arguments: list[str]) -> None:
    chosen = benchmarks_command._parser().parse_args(arguments)
    suite = benchmarks_command.SUITES[chosen.suite](quick=True, threads=[1], repeats=1)
    try:
        parts = [part.name for part in suite.parts()]
    finally:
        suite.close()
    for part in chosen.only or ():
        if part not in parts and part not in _full_parts(chosen.suite):
            raise UnknownCommandError(f"the suite {chosen.suite!r} has no part {part!r}; there are {parts}")


def _full_parts(name: str) -> list[str]:
    suite = benchmarks_command.SUITES[name](quick=False, threads=[1], repeats=1)
    try:
        return [part.name for part in suite.parts()]
    finally:
        suite.close()


_CHECKS: dict[str, Callable[[list[str]], None]] = {
    "cd": lambda _: None,
    "git": _git,
    "make": _make,
    "pip": _pip,
    "python": _python,
    "rowstep": _rowstep,
}

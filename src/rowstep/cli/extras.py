"""What the commands share. `console`, `table` and `positive` are for the benchmarks, too; only they need rich."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


class CommandError(Exception):
    """The command cannot go on; the message is all that the user sees."""


def console() -> Console:
    from rich.console import Console

    screen = Console()
    # Without a terminal rich takes 80 columns for granted, and tables in log files would wrap.
    return screen if screen.is_terminal else Console(width=150)


def table(title: str, words: Sequence[str], numbers: Sequence[str], caption: str | None = None) -> Table:
    """An empty table with columns of words and, on their right, columns of numbers."""
    from rich.table import Table

    made = Table(*words, title=title, caption=caption)
    for heading in numbers:
        made.add_column(heading, justify="right")
    return made


def positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


def seconds(text: str) -> float:
    if not 0 < (number := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"must be finite and above 0, not {text}")
    return number


def threads(text: str) -> int:
    if (number := positive(text)) > (cores := os.cpu_count() or 1):
        raise argparse.ArgumentTypeError(f"must be at most {cores}, the cores of this machine, not {number}")
    return number


def printable(text: str, longest: int = 100) -> str:
    """Text from a file, fit for a terminal: cut to this length, and whatever is not visible is escaped."""
    cut = text if len(text) <= longest else f"{text[: longest - 3]}..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode("ascii") for c in cut)

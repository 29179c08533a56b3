"""What the commands share."""

from __future__ import annotations

import argparse
import math
import os


class CommandError(Exception):
    """The command cannot go on; the message is all that the user sees."""


def positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, not {text!r}") from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


def seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, not {text!r}") from None
    if not 0 < number < math.inf:
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

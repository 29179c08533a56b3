"""What the commands share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any


class CommandError(Exception):
    """The command cannot go on; the message is all that the user sees."""


def number(kind: Any, expected: str, most: float = sys.float_info.max) -> Callable[[str], Any]:
    """A function that reads an argument, which is to be above 0."""

    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = 0
        if not 0 < value <= most:
            raise argparse.ArgumentTypeError(f"must be {expected}, not {text!r}")
        return value

    return read


positive = number(int, "a whole number above 0")

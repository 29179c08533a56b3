"""Types of arguments, for this command line and that of the benchmarks."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number

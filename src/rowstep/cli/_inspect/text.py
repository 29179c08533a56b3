"""Words from a file, made fit for a terminal: they may hold anything, also what clears the screen."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from rowstep.cli._inspect.stored import Stored, in_memory

LONGEST = 100
_MOST_ITEMS = 8


def printable(text: str, longest: int = LONGEST) -> str:
    """The text with everything that is no visible character, or that the output cannot encode, as an escape."""
    cut = text if len(text) <= longest else f"{text[: longest - 3]}..."
    visible = "".join(letter if letter.isprintable() else _escape(letter) for letter in cut)
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return visible.encode(encoding, "backslashreplace").decode(encoding)


def _escape(letter: str) -> str:
    return letter.encode("unicode_escape", "surrogatepass").decode("ascii")


def value(something: object) -> str:
    """A short form of any value. Values that are large, nested or strange are named by their type.

    ``repr`` is not asked: lists that contain each other many times over have a repr without end.
    """
    if isinstance(something, (list, tuple)) and len(something) <= _MOST_ITEMS:
        inner = [value(item) if not isinstance(item, (list, tuple)) else "..." for item in something]
        return f"({', '.join(inner)})"
    if isinstance(something, str):
        return printable(something)
    if something is None or isinstance(something, bool) or type(something) is torch.dtype:
        return str(something).removeprefix("torch.")
    if isinstance(something, int):
        return str(something) if abs(something) < 10**30 else "an int of over 30 digits"
    if isinstance(something, float):
        return f"{something:g}"
    if isinstance(something, (Tensor, Stored)):
        stored = something if isinstance(something, Stored) else in_memory(something)
        number = stored.number()
        return f"tensor({number:g})" if number is not None else f"tensor {shape(stored.shape)}"
    return f"<{printable(type(something).__name__)}>"


def shape(sizes: Sequence[int | None]) -> str:
    if len(sizes) > _MOST_ITEMS:
        return f"{len(sizes):,} dimensions"
    known = ("?" if size is None else f"{size:,}" if size < 1 << 63 else "over 2^63" for size in sizes)
    return " x ".join(known) if sizes else "scalar"


def count(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def dtype(kind: torch.dtype) -> str:
    return str(kind).removeprefix("torch.")


def size(nbytes: int) -> str:
    """Exact while it is short, then three digits that count."""
    if nbytes < 10_000:
        return f"{nbytes:,} B"
    power = min(4, (len(str(nbytes)) - 1) // 3)
    return f"{nbytes / 1000**power:#.3g} {('B', 'kB', 'MB', 'GB', 'TB')[power]}".replace(". ", " ")

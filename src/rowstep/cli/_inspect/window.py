"""A part of a file, as a file of its own."""

from __future__ import annotations

import io
import os
from typing import Any


class Window(io.RawIOBase):
    """The bytes ``start`` to ``start + length`` of an open file. Nothing outside of them is seen."""

    def __init__(self, file: io.BufferedReader, start: int, length: int) -> None:
        self._file, self._start, self._length, self._position = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise ValueError(f"a position of {base + offset} was asked for; expected at least 0")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        wanted = max(0, min(len(buffer), self._length - self._position))
        self._file.seek(self._start + self._position)
        count = self._file.readinto(memoryview(buffer)[:wanted])
        self._position += count
        return count

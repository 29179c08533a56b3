"""A tensor of a checkpoint: its shape and dtype are known, its numbers are read a few rows at a time.

A checkpoint may be larger than memory, so nothing here ever holds a whole table. Where the numbers lie depends on the
format: in memory that maps the file (`InMemory`), at a place in a file (`InFile`), or in pieces (`InPieces`).
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Buffer, Parameter

from rowstep._layout import is_spread
from rowstep._memory import has_memory, overlaps_itself

BLOCK = 1 << 18
"""How many numbers are read at once; a single row may have more.

The norms of 1M x 64 took 0.13 s on one thread, and 0.20 s with blocks of 1 << 20.
"""


class TruncatedError(Exception):
    """The numbers of a tensor end before they should."""


@dataclass(frozen=True)
class Stored:
    """What is known of a tensor without a look at its numbers. The first dimension counts rows."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    flaw: str | None = None
    """Why the numbers cannot be read."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def row_count(self) -> int:
        return self.shape[0] if self.shape else 1

    def rows(self, first: int, last: int) -> Tensor:
        """These rows, as a table of so many rows."""
        raise NotImplementedError(self.flaw)

    def blocks(self) -> Iterator[Tensor]:
        """All rows in order, as tables of at most ``BLOCK`` numbers each, or of one row; nothing if it is empty."""
        if self.flaw is not None or not self.numel:
            return
        height = max(1, BLOCK * self.row_count // self.numel)
        for first in range(0, self.row_count, height):
            yield self.rows(first, min(first + height, self.row_count))

    def number(self) -> float | None:
        """The one number of a tensor that has one."""
        if self.numel != 1 or self.flaw is not None or self.dtype.is_complex:
            return None
        return float(self.rows(0, 1).to(torch.float64).item())


@dataclass(frozen=True)
class InMemory(Stored):
    tensor: Tensor | None = None

    def rows(self, first: int, last: int) -> Tensor:
        assert self.tensor is not None
        lead = self.tensor if self.tensor.dim() else self.tensor.reshape(1)
        return lead[first:last].reshape(last - first, -1)


def in_memory(tensor: Tensor) -> Stored:
    """A tensor that is loaded or mapped, if it is what it seems; otherwise what is wrong with it."""
    if tensor.is_nested:
        return Stored((), tensor.dtype, 0, "a nested tensor")
    tensor = tensor.detach()
    shape = tuple(tensor.shape)
    if flaw := _flaw_of_kind(tensor):
        return Stored(shape, tensor.dtype, 0, flaw)
    if not has_memory(tensor):
        return Stored(shape, tensor.dtype, 0, "its storage is too small for its shape")
    if overlaps_itself(tensor):
        # An expanded tensor of one number may claim any size: to count its rows could take for ever.
        return Stored(shape, tensor.dtype, tensor.untyped_storage().nbytes(), "its numbers share memory")
    return InMemory(shape, tensor.dtype, tensor.nbytes, None, tensor)


def _flaw_of_kind(tensor: Tensor) -> str | None:
    if type(tensor) not in (Tensor, Parameter, Buffer):
        return f"a {type(tensor).__name__}"
    if tensor.layout != torch.strided:
        return str(tensor.layout).removeprefix("torch.")
    if tensor.is_meta:
        return "no data (meta)"
    if tensor.is_quantized:
        return "quantized"
    if not tensor.is_cpu:
        return f"on {tensor.device}"
    return None if _can_be_computed_with(tensor.dtype) else "a dtype to store only"


@functools.cache
def _can_be_computed_with(dtype: torch.dtype) -> bool:
    """Whether torch can make float64 of it. Some dtypes only name bits."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls half-precision complex numbers experimental
            number = torch.empty(1, dtype=dtype)
            (number.abs() if dtype.is_complex else number).to(torch.float64)
    except (RuntimeError, NotImplementedError, TypeError):
        return False
    return True


@dataclass(frozen=True)
class InFile(Stored):
    """Numbers in C order at one place of a file. Who makes this has seen that the file reaches that far."""

    path: Path = Path()
    start: int = 0

    def rows(self, first: int, last: int) -> Tensor:
        width = self.numel // self.row_count
        # Any byte but 0 and 1 is no bool, and torch does not say what it takes such for.
        kind = torch.uint8 if self.dtype == torch.bool else self.dtype
        block = torch.empty(last - first, width, dtype=kind)
        with open(self.path, "rb", buffering=0) as file:
            file.seek(self.start + first * width * self.dtype.itemsize)
            memory, filled = block.view(torch.uint8).numpy().reshape(-1).data, 0
            while filled < len(memory):
                count = file.readinto(memory[filled:])
                if not count:
                    raise TruncatedError(
                        f"{self.path.name} ends in the middle of a tensor; expected {self.nbytes} bytes"
                    )
                filled += count
        return block


def in_file(shape: tuple[int, ...], dtype: torch.dtype, path: Path, start: int) -> Stored:
    nbytes = math.prod(shape) * dtype.itemsize
    if not _can_be_computed_with(dtype):
        return Stored(shape, dtype, nbytes, "a dtype to store only")
    return InFile(shape, dtype, nbytes, None, path, start)


@dataclass(frozen=True)
class Piece:
    """Where in the whole a piece begins, along each dimension, and the piece."""

    offsets: tuple[int, ...]
    stored: Stored


@dataclass(frozen=True)
class InPieces(Stored):
    pieces: Sequence[Piece] = ()
    """In the order of their first rows."""

    def rows(self, first: int, last: int) -> Tensor:
        block: Tensor | None = None
        for piece in self.pieces:
            start = piece.offsets[0] if piece.offsets else 0
            if start >= last:
                break
            low, high = max(first, start), min(last, start + piece.stored.row_count)
            if low >= high:
                continue
            part = piece.stored.rows(low - start, high - start)
            if part.shape == (last - first, self.numel // self.row_count):
                return part
            if block is None:
                block = torch.zeros(last - first, *self.shape[1:], dtype=part.dtype)
            ranges = zip(piece.offsets[1:], piece.stored.shape[1:], strict=True)
            place = (slice(low - first, high - first), *(slice(begin, begin + size) for begin, size in ranges))
            block[place] = part.reshape(high - low, *piece.stored.shape[1:])
        if block is None:
            raise TruncatedError(
                f"rows {first} to {last} are in no piece; expected pieces for all {self.row_count} rows"
            )
        return block.reshape(last - first, -1)


def in_pieces(shape: tuple[int, ...], dtype: torch.dtype, pieces: Sequence[Piece]) -> Stored:
    """A tensor that was written in pieces, once all of them lie inside of it and are as large as it is."""
    nbytes = sum(piece.stored.nbytes for piece in pieces)
    for piece in pieces:
        part = piece.stored
        if part.flaw is not None:
            return Stored(shape, dtype, nbytes, part.flaw)
        ends = [offset + size for offset, size in zip(piece.offsets, part.shape, strict=True)]
        if len(part.shape) != len(shape) or any(end > size for end, size in zip(ends, shape, strict=True)):
            return Stored(shape, dtype, nbytes, "a piece reaches beyond its shape")
    if sum(piece.stored.numel for piece in pieces) != math.prod(shape):
        return Stored(shape, dtype, nbytes, "its pieces are not all of it")
    return InPieces(shape, dtype, nbytes, None, sorted(pieces, key=lambda piece: piece.offsets))


def in_models(stored: Stored, dim: int) -> Stored:
    """A tensor of a sharded table with the dimensions it has in a model, without those that tell the order of rows."""
    if not is_spread(stored.shape) or math.prod(stored.shape[dim:]) != 1:
        return stored
    shape = stored.shape[:dim]
    if not isinstance(stored, InPieces):
        return replace(stored, shape=shape)
    pieces = [Piece(piece.offsets[:dim], in_models(piece.stored, dim)) for piece in stored.pieces]
    return replace(stored, shape=shape, pieces=pieces)

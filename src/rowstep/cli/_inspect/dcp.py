"""Directories of torch.distributed.checkpoint.

Each tensor was written as one torch.save file per piece, and these lie one after another in the directory's files.
torch is asked only how a piece is laid out, with its data on the meta device; the numbers are read where the ZIP
archive has them, some rows at a time.
"""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rowstep.arrays._files import refuse_what_is_no_file
from rowstep.arrays._npz import checked_members
from rowstep.cli._inspect import metadata, torch_file
from rowstep.cli._inspect.reading import Checkpoint, UnreadableError, reason
from rowstep.cli._inspect.stored import Piece, Stored, in_file, in_memory, in_pieces
from rowstep.cli._inspect.window import Window

_NAME = ".metadata"
_LONGEST_METADATA = 1 << 30


def read(folder: Path) -> Checkpoint:
    path = folder / _NAME
    if not path.exists():
        raise UnreadableError(f"it is a directory without {_NAME}; expected one of torch.distributed.checkpoint")
    refuse_what_is_no_file(path)
    if path.stat().st_size > _LONGEST_METADATA:
        raise UnreadableError(f"{_NAME} has {path.stat().st_size} bytes; expected at most {_LONGEST_METADATA}")
    tree: dict[Any, Any] = {}
    entries = metadata.read(path.read_bytes())
    for entry in entries:
        _put(tree, entry.path, _leaf(folder, entry))
    files = {chunk.item.file for entry in entries for chunk in entry.chunks}
    return Checkpoint("torch.distributed.checkpoint", tree, sum((folder / name).stat().st_size for name in files))


def _put(tree: dict[Any, Any], path: tuple[Any, ...], leaf: object) -> None:
    """Set a leaf. Lists become dicts by number; a place that is taken by a leaf already keeps it."""
    *way, last = path
    for key in way:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            return
    tree.setdefault(last, leaf)


def _leaf(folder: Path, entry: metadata.Entry) -> Any:
    if entry.dtype is None:
        return _value(folder, entry.chunks[0].item)
    pieces = []
    for chunk in entry.chunks:
        try:
            stored = _piece(folder, chunk, entry.dtype)
        except (UnreadableError, OSError):
            raise
        except Exception as error:
            raise UnreadableError(f"{chunk.item.file} at {chunk.item.start}: {reason(error)}") from error
        pieces.append(Piece(chunk.offsets, stored))
    return in_pieces(entry.shape, entry.dtype, pieces)


def _value(folder: Path, item: metadata.Item) -> Any:
    """What is no tensor. One that is more than a plain value does not keep the rest from being shown."""
    path = _place(folder, item)
    with open(path, "rb") as file:
        try:
            return torch_file.load(_archive(file, item))
        except Exception:
            return None


def _piece(folder: Path, chunk: metadata.Chunk, dtype: torch.dtype) -> Stored:
    path = _place(folder, chunk.item)
    if chunk.item.is_transformed:
        return Stored(chunk.shape, dtype, chunk.item.length, "compressed or otherwise transformed")
    with open(path, "rb") as file:
        archive = _archive(file, chunk.item)
        tensor = torch_file.load(archive, device="meta")
        if not isinstance(tensor, Tensor) or tensor.shape != chunk.shape or tensor.dtype != dtype:
            raise ValueError("the piece is not the tensor that .metadata describes; expected the same shape and dtype")
        if not tensor.is_contiguous() or tensor.storage_offset():
            archive.seek(0)
            return in_memory(torch_file.load(archive))
        start, length = _numbers(archive)
    if min(length, chunk.item.length - start) < tensor.nbytes:
        raise ValueError(f"its tensor has {length} bytes at {start}; expected {tensor.nbytes}, all inside the item")
    return in_file(chunk.shape, dtype, path, chunk.item.start + start)


def _archive(file: io.BufferedReader, item: metadata.Item) -> io.BufferedReader:
    """The torch.save file that an item is, once all its entries can be in it."""
    view: io.BufferedReader = io.BufferedReader(Window(file, item.start, item.length))
    with zipfile.ZipFile(view) as archive:
        checked_members(archive, item.length)
    view.seek(0)
    return view


def _numbers(view: io.BufferedReader) -> tuple[int, int]:
    """Where in the archive the numbers of its only tensor begin, and how many bytes they are."""
    view.seek(0)
    with zipfile.ZipFile(view) as archive:
        found = [info for info in archive.infolist() if "/data/" in info.filename]
        if len(found) != 1:
            raise ValueError(f"the piece has {len(found)} storages; expected one")
        with archive.open(found[0]):  # compares the names in the two headers of the entry
            pass
    view.seek(found[0].header_offset + 26)
    lengths = view.read(4)
    start = found[0].header_offset + 30 + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
    return start, found[0].file_size


def _place(folder: Path, item: metadata.Item) -> Path:
    """The file of an item, which is inside the directory and long enough."""
    path = folder / item.file
    if "\0" in item.file or not path.resolve().is_relative_to(folder.resolve()) or os.path.isabs(item.file):
        raise UnreadableError(f".metadata names the file {item.file!r}; expected a file inside the directory")
    refuse_what_is_no_file(path)
    size = path.stat().st_size
    if item.start + item.length > size:
        end = item.start + item.length
        raise UnreadableError(f"{item.file} has {size} bytes; expected at least {end}, where .metadata has an item end")
    return path

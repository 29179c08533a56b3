"""Which format a path has, told by its contents, and what it holds as one tree of dicts and lists.

| contents | reader | how it is read |
|---|---|---|
| a ZIP archive with ``data.pkl`` | `torch_file` | torch.load with weights_only, mapped into memory |
| a ZIP archive of ``.npy`` | `array_file` | as rowstep.arrays loads it |
| a header of safetensors | `array_file` | block by block, from where the header says |
| a directory with ``.metadata`` | `dcp` | names from a restricted unpickler, tensors block by block |
"""

from __future__ import annotations

import os
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rowstep.arrays import _files


class UnreadableError(Exception):
    """This is no checkpoint that can be shown; the message says why."""


@dataclass(frozen=True)
class Checkpoint:
    """A tree whose leaves are tensors, ``Stored`` or any other value."""

    kind: str
    tree: Any
    size: int
    """In bytes, on disk."""


def read(path: Path) -> Checkpoint:
    """What the file or directory holds. Whatever is wrong with it becomes an UnreadableError."""
    from rowstep.cli._inspect import dcp

    try:
        if path.is_dir():
            return dcp.read(path)
        _files.refuse_what_is_no_file(path)
        return _read_file(path)
    except UnreadableError:
        raise
    except OSError as error:
        inner = f"{Path(error.filename).name}: " if error.filename and Path(error.filename) != path else ""
        raise UnreadableError(f"{inner}{error.strerror or error}") from error
    # torch, zipfile and json say in many ways that a file is broken, and a deep one ends in RecursionError.
    except Exception as error:
        raise UnreadableError(reason(error)) from error


def reason(error: Exception) -> str:
    """The first sentence of an error, because torch's go on for pages."""
    text = str(error).strip().split("\n")[0].split(". ")[0]
    return text or type(error).__name__


def _read_file(path: Path) -> Checkpoint:
    from rowstep.cli._inspect import array_file, torch_file

    with open(path, "rb") as file:
        start = file.read(9)
        size = os.fstat(file.fileno()).st_size
    if start.startswith(b"PK"):
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
        if any(name.endswith("/data.pkl") for name in names):
            return Checkpoint("torch.save", torch_file.read(path), size)
        return Checkpoint("rowstep.arrays", array_file.read_npz(path), size)
    if start[8:] == b"{":
        return Checkpoint("safetensors", array_file.read_safetensors(path), size)
    if start.startswith(b"\x80"):
        raise UnreadableError(
            "it is a bare pickle, which only running it can read; expected the ZIP format that torch.save has written "
            "since torch 1.6. If you trust it, load it and save it again"
        )
    raise UnreadableError(
        f"it begins with {start!r}; expected a file of torch.save, .npz or .safetensors, or a directory of "
        "torch.distributed.checkpoint"
    )

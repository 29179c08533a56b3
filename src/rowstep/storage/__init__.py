"""Tables in files: ordinary safetensors files, mapped for writing, so that a table may be larger than memory.

``create`` and ``open`` return plain CPU tensors whose memory is the file: a step on them changes the file. No call
passes over a whole file, except ``create`` with an ``init``, and ``snapshot`` where blocks cannot be shared.

Promised, on Linux with ext4, XFS or btrfs:

- What was written survives the process, also SIGKILL. It survives a power loss once ``sync`` has returned.
- ``sync``, ``snapshot`` and a process that ends, also by an exception, write the moves that rows wait for under a
  deferred optimizer. After SIGKILL, ``open`` and ``status`` say that these may be missing.
- ``open`` warns if a file was written after its last sync. It may then hold half a step, and the state at the sync is
  gone; ``snapshot`` keeps one. A snapshot is whole and durable, or its folder is not there.
- One process writes a file, and a second one is refused. Readers are not, and may see half a step.
- With ``reserve=True`` there is space for every row (not on btrfs, which never writes in place). Without it, rows take
  space when they are first written; if the disk is full then, the process ends with SIGBUS, as with any mapped file.

Not promised: that numbers are intact (safetensors has no checksums), that nobody truncates a file in use, and anything
on network file systems, where this was not tried. On tmpfs no file is ever called clean; ``_record.py`` says why.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

if sys.platform != "linux":
    raise ImportError(f"rowstep.storage relies on Linux, for its locks and file times; this is {sys.platform}")

from .. import _torch_version as _torch_version  # it refuses a torch that is too old  # isort: skip
from .._memory import before_sync
from . import _header, _mapping, _record, _snapshot
from ._header import FileFormatError
from ._record import Status

__all__ = ["FileFormatError", "Status", "create", "open", "snapshot", "status", "sync"]

_CHUNK_BYTES = 64 << 20


def create(
    path: str | os.PathLike[str],
    rows: int,
    dim: int | Sequence[int],
    dtype: torch.dtype = torch.float32,
    init: Callable[[Tensor], object] | None = None,
    *,
    key: str = "weight",
    reserve: bool = False,
) -> Tensor:
    """Make a file with one table, durably, and return the table as a tensor whose memory is the file.

    Args:
        path: of the new file. If this raises, there is none.
        rows: how many.
        dim: columns; ``()`` for a tensor of one dimension, several numbers for one of more than two.
        dtype: float64, float32, float16, bfloat16, int64 or int32.
        init: fills zeros in place, as ``torch.nn.init.normal_`` does. It is called for 64 MB of rows at a time, in
            order, with a progress bar if that takes long and rich is installed. None: zeros, which are not written.
        key: the tensor's name in the file.
        reserve: reserve disk space for the whole table now.

    Returns:
        The tensor. The file stays open and locked while it, a view or a Parameter of it exists.
    """
    shape = (rows, *dim) if isinstance(dim, Sequence) else (rows, dim)
    if any(type(size) is not int or size < 1 for size in shape):
        raise ValueError(f"the shape is {shape}; expected integers of at least 1")
    if dtype not in _header.DTYPES.values():
        raise ValueError(f"dtype is {dtype}; expected one of {', '.join(map(str, _header.DTYPES.values()))}")
    if not key or key == "__metadata__":
        raise ValueError(f"key is {key!r}; expected a name, other than __metadata__")
    header, span = _header.write(key, dtype, shape)
    if span.end >= 2**63:
        raise ValueError(f"the shape {shape} takes {span.end} bytes; expected less than 2**63")
    place = os.path.realpath(path)

    def fill(file: int) -> None:
        at_once = min(rows, max(1, _CHUNK_BYTES * rows // (span.end - span.begin)))
        buffer = torch.empty(at_once, *shape[1:], dtype=dtype, device="cpu")
        with torch.no_grad(), os.fdopen(os.dup(file), "r+b") as target:
            target.seek(span.begin)
            for start in _with_bar(range(0, rows, at_once), place):
                chunk = buffer[: rows - start].zero_()
                made = init(chunk) if init else None
                if made is not None and made is not chunk:
                    raise TypeError("init returned another object; expected it to fill the tensor that it is given")
                target.write(chunk.view(torch.uint8).numpy().data)

    with _mapping.explained(place):
        return _mapping.create_tensor(place, header, span, fill if init else None, reserve)


def _with_bar(chunks: Sequence[int], path: str) -> Iterable[int]:
    try:
        from rich.console import Console
        from rich.progress import track
    except ImportError:
        return chunks
    is_quick = len(chunks) * _CHUNK_BYTES < 2 << 30  # some seconds
    return track(chunks, f"Filling {path}", console=Console(stderr=True), transient=True, disable=is_quick)


def open(path: str | os.PathLike[str], key: str, *, writable: bool = False) -> Tensor:
    """Map a tensor of an existing file in place. Nothing behind the header is read, and nothing is copied.

    Warns if the file was written after its last sync. In one process, a file may be opened several times for writing:
    tensors then share memory, as views do.

    Args:
        path: the file, or the folder or the index (``model.safetensors.index.json``) of a checkpoint in several files.
        key: the tensor's name.
        writable: writing to the tensor writes to the file. Otherwise what is written stays in this process's memory.

    Returns:
        The tensor. The file stays open, and locked if writable, while it, a view or a Parameter of it exists.
    """
    place = os.fspath(path)
    with _mapping.explained(place):
        return _mapping.open_tensor(os.path.realpath(_header.find_shard(place, key)), key, writable)


def sync(*tensors: Tensor) -> int:
    """Make what was written to the files of these tensors durable, and note it for who opens them next.

    Nobody may write meanwhile: a file that is written counts as written after the sync.

    Args:
        tensors: of ``create`` or ``open``, views or Parameters of them. None: all that this process can write.

    Returns:
        What ``status`` shows as ``synced_at``.
    """
    for function in before_sync:
        function(-1)
    now, errors = time.time_ns(), []
    for file in _mapping.files_of(tensors):
        try:
            with _mapping.explained(file.path):
                file.sync(now)
        except OSError as error:  # of its own: the others are synced
            errors.append(error)
    try:
        if errors:
            raise errors[0]
    finally:
        errors.clear()  # or a traceback would keep itself, and what is open, alive
    return now


def snapshot(folder: str | os.PathLike[str], *tensors: Tensor) -> None:
    """Sync files and copy them into a new folder, which appears with all of them, durably, or not at all.

    Blocks are shared where the file system can (XFS, btrfs). Elsewhere, all that has been written so far is copied.
    Nobody may write meanwhile: that is noticed, and raises.

    Args:
        folder: must not exist. Files keep their names, so these must differ.
        tensors: as for ``sync``.
    """
    synced_at, place, files = sync(*tensors), os.path.realpath(folder), _mapping.files_of(tensors)
    if not files:
        raise ValueError("this process has no file open for writing; expected one or more to copy")
    with _mapping.explained(place):
        _snapshot.copy(files, place, synced_at)


def status(path: str | os.PathLike[str]) -> Status:
    """Whether a file is as its last sync left it, when that was, and the reason in words."""
    path = os.path.realpath(path)
    with _mapping.explained(path):
        return _record.judge(_record.read(path), os.stat(path))

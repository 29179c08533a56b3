"""Files mapped into memory: one mapping and one lock for each file that this process writes.

A tensor keeps the buffer that it was made from, here a ``MappedFile``, and that keeps the mapping and the open file
with its lock. All of them end with the last tensor on the file, or with the process, however that ends.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import functools
import math
import mmap
import os
import resource
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import util
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._memory import before_sync
from .._warnings import warn
from . import _header, _record
from ._header import FileFormatError, Span
from ._record import Record

_ADVICE = {
    errno.EACCES: "get permission for the file and its folder, or open it without writable=True",
    errno.EAGAIN: "another process has it open for writing, and only one may. Open it without writable=True to read",
    errno.EEXIST: "choose another path, or delete what is there",
    errno.ENOSPC: "free disk space, or choose another disk",
}
_READERS = 32  # threads that wait for the disk
_PATIENCE_SECONDS = 10.0  # a process that ends waits so long for a thread of its own
_SAMPLED = 64  # of so many rows, one tells whether they are in memory
_MAP_NORESERVE = 0x4000  # without it, a private mapping larger than memory is refused. Python 3.13 has a name for it


class MappedFile(mmap.mmap):
    """A whole file, mapped for writing."""

    path: str
    file: int  # open, and locked
    opened_at: int
    deferrals: weakref.WeakSet[Any]  # of tables in here, rows of which may wait for steps
    has_failed = False

    def sync(self, now: int) -> None:
        """Make every store so far durable, and note that."""
        if self.has_failed:
            raise OSError(errno.EIO, "an earlier sync failed, and what it did not write may be lost")
        # First of all, so that what is stored while this runs counts as stored after the sync.
        modified = _record.modified_ns(self.file, self.path)
        try:
            self.flush()
            os.fsync(self.file)
        except OSError:
            self.has_failed = True  # the kernel reports a page that it could not write once, and then calls it clean
            raise
        deferred_since = self.opened_at if self.deferrals else None  # the next step lets rows wait again
        _record.write(self.path, Record(now, modified, _record.identity(os.fstat(self.file)), deferred_since))

    def note_deferral(self, deferral: Any) -> None:
        """Note, for who finds the file after a kill, that rows may wait from now on."""
        self.deferrals.add(deferral)
        with explained(self.path):
            record = _record.read(self.path)
            if record is not None and record.deferred_since is None:
                _record.write(self.path, record._replace(deferred_since=self.opened_at))

    def has(self, tensor: Tensor) -> bool:
        start = torch.frombuffer(self, dtype=torch.uint8).data_ptr()
        return start <= tensor.untyped_storage().data_ptr() < start + len(self)


_mapped: weakref.WeakValueDictionary[str, MappedFile] = weakref.WeakValueDictionary()  # by identity


def _files() -> list[MappedFile]:
    # Listed in one call, while other threads may open more.
    return [file for each in _mapped.valuerefs() if (file := each()) is not None]


def files_of(tensors: Sequence[Tensor]) -> list[MappedFile]:
    """The files that the tensors are in, or all that this process writes if there are no tensors."""
    files = _files()
    for tensor in tensors:
        if not any(file.has(tensor) for file in files):
            raise ValueError(
                f"a tensor of shape {tuple(tensor.shape)} is not in a file that this process writes; expected one of "
                "storage.create or storage.open(..., writable=True), or a view or Parameter of it"
            )
    return [file for file in files if not tensors or any(file.has(tensor) for tensor in tensors)]


@contextlib.contextmanager
def explained(path: str) -> Iterator[None]:
    """Add to an error of the system what to do about it. It keeps its number, and with it its class."""
    try:
        yield
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0)
        raise OSError(error.errno, f"{error.strerror}; {advice}" if advice else error.strerror, path) from error


def create_tensor(path: str, header: bytes, span: Span, fill: Callable[[int], None] | None, reserve: bool) -> Tensor:
    """On a new file, which is sparse unless space is reserved or ``fill`` writes to it."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _record.write(path, Record(None, None, None))  # for whoever finds it half filled
        os.pwrite(file, header, 0)
        os.ftruncate(file, span.end)
        if reserve:
            os.posix_fallocate(file, 0, span.end)
        if fill is not None:
            fill(file)
        memory = _map(file, path)
        memory.sync(time.time_ns())
    except BaseException:
        os.unlink(path)
        _record.beside(path).unlink(missing_ok=True)
        raise
    finally:
        os.close(file)
    return _tensor(memory, span)


def open_tensor(path: str, key: str, writable: bool) -> Tensor:
    # O_NONBLOCK: opening a pipe does not wait for its other end.
    file = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_NONBLOCK)
    try:
        identity = _record.identity(os.fstat(file))
        memory = _mapped.get(identity)
        if writable and memory is None:  # before anything is read: who makes the file has the lock
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        span = _header.find(file, path, key)
        if not writable:
            _checked_record(file, path)
            # Private, copied on write: a store into memory that can only be read would end the process.
            private, read_and_write = mmap.MAP_PRIVATE | _MAP_NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
            return _tensor(mmap.mmap(file, 0, private, read_and_write), span)
        if memory is None:
            record = _checked_record(file, path) or Record(0, _record.modified_ns(file, path), None)
            if record.open_in is None:  # if it is another boot's, the file stays unclean until it is synced
                _record.write(path, record._replace(open_in=identity))
            memory = _map(file, path)
        return _tensor(memory, span)
    finally:
        os.close(file)


def _checked_record(file: int, path: str) -> Record | None:
    record = _record.read(path)
    status = _record.judge(record, os.fstat(file))
    if record is not None and record.synced_at is None:
        raise FileFormatError(f"{path} cannot be used: {status.reason}. Delete it, and create it again")
    if status.clean is False:
        warn(f"{path} is not clean: {status.reason}. Go on with it as it is, or with a snapshot")
    return record


def _tensor(memory: mmap.mmap, span: Span) -> Tensor:
    # Read the pages that are touched and no others. 1,000 rows of a sparse file of 100 GB took 20 s without this, on a
    # disk with 8 MB of read-ahead, and 14 ms with it. A pass over a cold file pays for it: 18 s a GB instead of 3.
    memory.madvise(mmap.MADV_RANDOM)
    assert span.dtype is not None
    flat = torch.frombuffer(memory, dtype=span.dtype, count=math.prod(span.shape), offset=span.begin)
    return flat.view(span.shape)


def read_rows(tensor: Tensor, rows: Tensor) -> None:
    """Have these rows in memory, for whoever reads them next: what is on disk, many threads read at the same time.

    A thread that touches a page on disk waits for it. With 20,000 such pages in a batch, this took 1.4 s in one thread
    and 0.36 s in 32; to advise the system of each page (madvise) 0.42 s, and 60 ms where all were in memory.
    """
    row_bytes = tensor.nbytes // len(tensor)
    numbers = tensor.detach().view(-1).view(torch.uint8).numpy()
    # Of a product: torch never again resizes what NumPy has seen, and the rows may become those of a gradient.
    begins = (rows.long() * row_bytes).numpy()

    def touch(begins: Any) -> int:
        """Return how many pages were on disk."""
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_majflt
        for offset in {*range(0, row_bytes, mmap.PAGESIZE), row_bytes - 1}:
            numbers[begins + offset]
        return resource.getrusage(resource.RUSAGE_THREAD).ru_majflt - before

    if touch(begins[::_SAMPLED]):
        # Threads cannot start while the interpreter exits, or at a system limit. The lookup then reads the rows itself.
        with contextlib.suppress(RuntimeError), ThreadPoolExecutor(_READERS) as readers:
            list(readers.map(touch, np.array_split(begins, _READERS)))


def _map(file: int, path: str) -> MappedFile:
    memory = MappedFile(file, 0)
    memory.path, memory.file = path, os.dup(file)
    memory.opened_at, memory.deferrals = time.time_ns(), weakref.WeakSet()
    weakref.finalize(memory, _end, memory.file, path, os.getpid(), memory.opened_at, memory.deferrals)
    _mapped[_record.identity(os.fstat(file))] = memory
    _await_end(os.getpid())
    return memory


def _end(file: int, path: str, owner: int, opened_at: int, deferrals: Iterable[Any]) -> None:
    if os.getpid() == owner:  # a forked process leaves that to its parent
        _note_end(file, path, opened_at, deferrals)
    os.close(file)


def _note_end(file: int, path: str, opened_at: int, deferrals: Iterable[Any]) -> None:
    """Note an orderly end: that nothing was stored after the last sync, and that no rows of ours are left waiting."""
    with contextlib.suppress(OSError, FileFormatError):
        record = ended = _record.read(path)
        if record is None or ended is None:
            return
        if _record.judge(record, os.fstat(file)).clean:
            ended = ended._replace(open_in=None)
        if record.deferred_since == opened_at and not any(deferral.has_waiting_rows for deferral in deferrals):
            ended = ended._replace(deferred_since=None)
        if ended != record:
            _record.write(path, ended)


@functools.cache
def _await_end(process: int) -> None:
    # After the first ``weakref.finalize``, so that this is called before files are closed.
    atexit.register(_write_all)
    util.Finalize(None, _write_all, exitpriority=0)  # children of multiprocessing end without atexit's functions


def _write_all() -> None:
    """When the process ends: have everything written that belongs into its files."""
    with contextlib.ExitStack() as stack:  # each of these is called, whatever the others raise
        for file in _files():
            stack.callback(_note_end, file.file, file.path, file.opened_at, file.deferrals)
        for function in before_sync if _mapped else ():
            stack.callback(function, _PATIENCE_SECONDS)


# A forked process writes no files of its parent, and nothing into them that waits there.
os.register_at_fork(after_in_child=_mapped.clear)

"""Copy files into a new folder, which appears with all of them or not at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence

from . import _record
from ._mapping import MappedFile
from ._record import Record

_FICLONE = 0x40049409  # ioctl: share the blocks of another file until one of the two is written
_CHUNK_BYTES = 16 << 20


def copy(files: Sequence[MappedFile], folder: str, synced_at: int) -> None:
    """Copy files that were just synced."""
    names = [os.path.basename(file.path) for file in files]
    if len(set(names)) < len(names):
        raise ValueError(f"the files are called {', '.join(names)}; expected different names in one folder")
    if os.path.lexists(folder):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
    partial = f"{folder}.rowstep-partial"
    shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed in here
    os.makedirs(partial)
    try:
        for file, name in zip(files, names, strict=True):
            _copy(file, os.path.join(partial, name), synced_at)
        os.rename(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    _record.sync_folder(os.path.dirname(folder))


def _copy(source: MappedFile, path: str, synced_at: int) -> None:
    with open(path, "xb") as target:
        try:
            fcntl.ioctl(target, _FICLONE, source.file)
        except OSError:  # another file system, or one that does not share blocks
            target.truncate(len(source))
            for begin, end in _written_parts(source.file):
                target.seek(begin)
                for start in range(begin, end, _CHUNK_BYTES):
                    target.write(os.pread(source.file, min(_CHUNK_BYTES, end - start), start))
            target.flush()
        os.fsync(target.fileno())
        record = _record.read(source.path)
        if record is None or record.modified_ns not in (None, os.fstat(source.file).st_mtime_ns):
            raise OSError(errno.EBUSY, f"{source.path} was written while it was copied; expected no step meanwhile")
        _record.write(path, Record(synced_at, _record.modified_ns(target.fileno(), path), open_in=None))


def _written_parts(file: int) -> Iterator[tuple[int, int]]:
    """Where a sparse file has data."""
    end = 0
    with contextlib.suppress(OSError):  # ENXIO: what is left is a hole
        while True:
            begin = os.lseek(file, end, os.SEEK_DATA)
            end = os.lseek(file, begin, os.SEEK_HOLE)
            yield begin, end

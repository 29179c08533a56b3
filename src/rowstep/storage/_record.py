"""Whether a file is as its last sync left it.

Nobody sees a store into mapped memory except the kernel: a sync write-protects all pages of a file, so that the first
store into one of them faults, and this sets the file's time of modification. A sync notes that time in a small file
beside the table, ``<path>.rowstep.json``. While the table has the same time, it is as it was synced. Every mapped file
has these faults, so a step pays nothing for it; it sees every kind of writer, and the table stays ordinary safetensors.

- After SIGKILL the kernel still has the pages and the time: the answer is exact.
- After a power loss, pages may have reached the disk without the new time. So the record also says, durably and before
  the first store, in which boot of the machine the file is open for writing. A file that was open in an earlier boot is
  not clean, whatever its time is.
- tmpfs and some network file systems do not set the time; ``_notices_stores`` tries. No file is clean there.
"""

from __future__ import annotations

import functools
import itertools
import json
import mmap
import os
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from ._header import FileFormatError

# The kernel's clock for files ticks every 10 ms at most. Within one tick, two stores set the same time.
_TICK_SECONDS = 0.02

_numbers = itertools.count()
"""Of new records: other threads, and a signal's handler, may write one at the same time."""


class Record(NamedTuple):
    synced_at: int | None  # in nanoseconds since 1970; None while ``create`` fills the file, 0 if others made it
    modified_ns: int | None  # time of modification at that sync; None if the file system does not keep it up to date
    open_in: str | None  # ``identity`` while a process has it open for writing, and after one that ended out of order
    # When the process opened it (in nanoseconds) under whose deferred optimizer rows may wait; None if none can.
    deferred_since: int | None = None


class Status(NamedTuple):
    clean: bool | None
    """None if there is no record: rowstep.storage has never had the file open for writing."""
    synced_at: int | None
    """When the last sync began, in nanoseconds since 1970. Files that one call synced have the same number."""
    reason: str


def judge(record: Record | None, file: os.stat_result) -> Status:
    """Compare the record with the file as it is."""
    if record is None:
        return Status(None, None, "rowstep.storage has never had it open for writing")
    if record.synced_at is None:
        reason = "its creation has not finished"
    elif record.modified_ns is None:
        reason = "its file system does not tell whether it was written after its last sync"
    elif record.open_in not in (None, identity(file)):
        reason = "it was open for writing when the machine stopped or it was copied, so parts may be newer than others"
    elif record.modified_ns != file.st_mtime_ns:
        reason = "it was written after its last sync, so the last step may be there in part"
    else:
        return Status(True, record.synced_at, "it is as its last sync left it")
    if record.deferred_since is not None:
        reason += ", and rows may lack moves that a deferred optimizer had put off"
    return Status(False, record.synced_at, reason)


def read(path: str) -> Record | None:
    try:
        return Record(**json.loads(beside(path).read_bytes()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, RecursionError):
        raise FileFormatError(f"{beside(path)} is damaged; delete it if {path} is known to be good") from None


def write(path: str, record: Record) -> None:
    """Durably, and whole or not at all. Only the process that has the file's lock may call this."""
    new = Path(f"{path}.rowstep.{next(_numbers)}.new")
    try:
        with new.open("w") as file:
            json.dump(record._asdict(), file)
            file.flush()
            os.fsync(file.fileno())
        new.replace(beside(path))
    finally:
        new.unlink(missing_ok=True)
    sync_folder(os.path.dirname(path))


def beside(path: str) -> Path:
    return Path(f"{path}.rowstep.json")


def sync_folder(folder: str) -> None:
    """Make the names of its files durable."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def modified_ns(file: int, path: str) -> int | None:
    """The time of modification, once every later store will set another one; None if stores do not set it."""
    modified = os.fstat(file).st_mtime_ns
    if time.time_ns() - modified < _TICK_SECONDS * 1e9:
        time.sleep(_TICK_SECONDS)
    return modified if _notices_stores(os.path.dirname(path)) else None


@functools.cache
def _notices_stores(folder: str) -> bool:
    with tempfile.TemporaryFile(dir=folder) as file:
        file.truncate(mmap.PAGESIZE)
        with mmap.mmap(file.fileno(), mmap.PAGESIZE) as memory:
            memory[0] = 1  # tmpfs notices the first store into a hole, and no other
            os.fsync(file.fileno())
            before = os.fstat(file.fileno()).st_mtime_ns
            time.sleep(_TICK_SECONDS)
            memory[0] = 2
            return os.fstat(file.fileno()).st_mtime_ns != before


def identity(file: os.stat_result) -> str:
    """This file and no copy of it, in this boot of the machine and no other."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{file.st_dev}/{file.st_ino}"

"""A file that takes the place of another once it is whole: at any moment there is the old one or the new one.

It is written beside its place, brought to the disk, and then renamed. If the process is killed meanwhile, what it wrote
stays behind; the next save to the same place removes it. A writer holds a lock on its file, and the lock ends with its
process, so a file that can be locked has no writer any more.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write, in place of what is at ``path``. An OSError says that this is as it was."""
    try:
        _remove_what_dead_writers_left(path)
        with _written_beside(path) as file:
            yield file
    except OSError as error:
        reason = (
            f"{error.strerror or error}; nothing was saved, and any existing file is unchanged. Free disk space, fix "
            "the permissions, or save to another path"
        )
        raise OSError(error.errno, reason, os.fspath(path)) from error
    _bring_to_disk(path.parent)


@contextlib.contextmanager
def _written_beside(path: Path) -> Iterator[BinaryIO]:
    beside, file = _create_locked(path)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            if fcntl is not None:  # while it is locked
                os.replace(beside, path)
        if fcntl is None:
            os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def _prefix(path: Path) -> str:
    """What the names of files that are to replace ``path`` begin with: short, however long the name is."""
    return f".rowstep-{hashlib.sha256(os.fsencode(path.name)).hexdigest()[:16]}-"


def _create_locked(path: Path) -> tuple[Path, BinaryIO]:
    """A new file beside ``path`` that nobody takes for left behind."""
    while True:
        # Not a file of `tempfile`: those can be read by their owner only, and the rename would keep it so.
        beside = path.with_name(f"{_prefix(path)}{secrets.token_hex(4)}.tmp")
        file = open(beside, "xb")  # noqa: SIM115  the caller closes it
        try:
            _lock(file.fileno())
            if _is_at(file.fileno(), beside):
                return beside, file
        except BlockingIOError:
            pass
        except OSError:  # a file system without locks: nobody can take this file for left behind
            return beside, file
        file.close()  # another writer came between, and removes it


def _remove_what_dead_writers_left(path: Path) -> None:
    for left in path.parent.glob(f"{_prefix(path)}*.tmp"):
        with contextlib.suppress(OSError), open(left, "r+b") as file:
            _lock(file.fileno())
            left.unlink()


def _lock(descriptor: int) -> None:
    """Lock a file until it is closed; a BlockingIOError if somebody else has, an OSError if files have no locks."""
    if fcntl is None:
        raise OSError("no locks")
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _bring_to_disk(folder: Path) -> None:
    """Make the rename itself last; not every system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

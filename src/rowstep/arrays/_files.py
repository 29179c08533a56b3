"""A state in one file, ``.npz`` or ``.safetensors``.

Both hold the same: for each name the arrays ``<name>/exp_avg`` and ``<name>/exp_avg_sq``, and under ``rowstep.arrays``
a text, the rest of the state as JSON. Nothing is pickled. A .npz carries checksums, a .safetensors file does not.

A file is written beside its place, brought to the disk, and then renamed: at any moment there is the old file or the
new one, whole.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from . import _safetensors
from ._operands import FloatArray

_HEADER = "rowstep.arrays"
_VERSION = 1

Arrays = dict[str, FloatArray]


class _Format(NamedTuple):
    write: Callable[[BinaryIO, str, Arrays], None]
    read: Callable[[BinaryIO], tuple[str, Arrays]]


def save(path: str | os.PathLike[str], state_dict: Mapping[str, Any]) -> None:
    """Write a state, in place of what was there."""
    form = _format_of(path)
    rest = {key: value for key, value in state_dict.items() if key != "state"}
    header = json.dumps({"version": _VERSION, **rest})
    arrays = {f"{name}/{key}": array for name, moments in state_dict["state"].items() for key, array in moments.items()}
    with _replacing(Path(os.path.realpath(path))) as file:
        form.write(file, header, arrays)


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read what ``save`` wrote."""
    form = _format_of(path)
    with open(path, "rb") as file:
        try:
            header, arrays = form.read(file)
            return _state_from(header, arrays)
        except _DAMAGE as error:
            reason = str(error) or type(error).__name__
            raise ValueError(f"{os.fspath(path)} cannot be read as a state of rowstep.arrays: {reason}") from error


def _state_from(header: str, arrays: Arrays) -> dict[str, Any]:
    rest = json.loads(header)
    if not isinstance(rest, dict) or rest.pop("version", None) != _VERSION:
        raise ValueError(f"its header is {header[:80]!r}; expected version {_VERSION}")
    state: dict[str, dict[str, FloatArray]] = {}
    for key, array in arrays.items():
        name, slash, field = key.rpartition("/")
        if not slash:
            raise ValueError(f"it holds {key!r}; expected '<name>/exp_avg' or '<name>/exp_avg_sq'")
        state.setdefault(name, {})[field] = array
    return {**rest, "state": state}


def _write_npz(file: BinaryIO, header: str, arrays: Arrays) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        for key, array in {_HEADER: np.array(header), **arrays}.items():
            with archive.open(f"{key}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def _read_npz(file: BinaryIO) -> tuple[str, Arrays]:
    arrays = {}
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            if info.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"{info.filename} is compressed; expected it as it was saved")
            with archive.open(info) as member:
                array = np.lib.format.read_array(member, allow_pickle=False)
                if member.read(1):  # at the end the checksum is compared
                    raise ValueError(f"{info.filename} holds more than its array")
                arrays[info.filename.removesuffix(".npy")] = array
    if _HEADER not in arrays:
        raise ValueError(f"it holds no {_HEADER!r}")
    return str(arrays.pop(_HEADER)), arrays


def _write_safetensors(file: BinaryIO, header: str, arrays: Arrays) -> None:
    _safetensors.write(file, {_HEADER: header}, arrays)


def _read_safetensors(file: BinaryIO) -> tuple[str, Arrays]:
    metadata, arrays = _safetensors.read(file)
    if _HEADER not in metadata:
        raise ValueError(f"its metadata holds no {_HEADER!r}")
    return metadata[_HEADER], arrays


_FORMATS = {
    ".npz": _Format(_write_npz, _read_npz),
    ".safetensors": _Format(_write_safetensors, _read_safetensors),
}

# What reading a damaged or hostile file may raise. An OSError is the disk's and passes as it is.
_DAMAGE = (ValueError, KeyError, EOFError, RuntimeError, MemoryError, zipfile.BadZipFile)


def _format_of(path: str | os.PathLike[str]) -> _Format:
    suffix = Path(path).suffix
    if suffix not in _FORMATS:
        raise ValueError(f"{os.fspath(path)} has the suffix {suffix!r}; expected {' or '.join(_FORMATS)}")
    return _FORMATS[suffix]


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write that takes the place of ``path`` once it is whole and on the disk."""
    # Not a file of `tempfile`: those can be read by their owner only, and the rename would keep it so.
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(beside, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    _bring_to_disk(path.parent)


def _bring_to_disk(folder: Path) -> None:
    """Make the rename itself last; not every system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

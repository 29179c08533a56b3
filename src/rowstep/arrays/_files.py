"""A state in one file, ``.npz`` or ``.safetensors``.

Both hold the same: for each name the arrays ``<name>/exp_avg`` and ``<name>/exp_avg_sq``, and under ``rowstep.arrays``
a text, the rest of the state as JSON. Nothing is pickled. A .npz carries checksums, a .safetensors file does not.

At any moment there is the old file or the new one, whole: see ``_replace``.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from . import _npz, _safetensors
from ._operands import FloatArray
from ._replace import replacing

HEADER = "rowstep.arrays"
_VERSION = 1

Arrays = dict[str, FloatArray]


class _Format(NamedTuple):
    """How texts and arrays lie in a file. What is wrong with a file that is read may show as any exception."""

    write: Callable[[BinaryIO, dict[str, str], Arrays], None]
    read: Callable[[BinaryIO], tuple[dict[str, str], Arrays]]


def save(path: str | os.PathLike[str], state_dict: Mapping[str, Any]) -> None:
    """Write a state, in place of what was there."""
    form = _format_of(path)
    rest = {key: value for key, value in state_dict.items() if key != "state"}
    header = json.dumps({"version": _VERSION, **rest})
    arrays = {f"{name}/{key}": array for name, moments in state_dict["state"].items() for key, array in moments.items()}
    place = Path(os.path.realpath(path))
    refuse_what_is_no_file(place, missing_allowed=True)
    with replacing(place) as file:
        form.write(file, {HEADER: header}, arrays)


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read what ``save`` wrote."""
    form = _format_of(path)
    refuse_what_is_no_file(path)
    with open(path, "rb") as file:
        try:
            return state_from(*form.read(file))
        except Exception as error:
            # The disk's errors pass as they are, but for the one that stands for an impossible place in the file.
            if isinstance(error, OSError) and error.errno != errno.EINVAL:
                raise
            reason = str(error) or type(error).__name__
            raise ValueError(f"{os.fspath(path)} cannot be read as a state of rowstep.arrays: {reason}") from error


def state_from(texts: dict[str, str], arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The state dict that these texts and arrays are, whatever stands for an array."""
    if HEADER not in texts:
        raise ValueError(f"it has no entry {HEADER!r}; expected one, as save() writes")
    header = texts[HEADER]
    rest = json.loads(header)
    if not isinstance(rest, dict) or rest.pop("version", None) != _VERSION:
        raise ValueError(f"its header is {header[:80]!r}; expected version {_VERSION}")
    state: dict[str, dict[str, Any]] = {}
    for key, array in arrays.items():
        name, slash, field = key.rpartition("/")
        if not slash:
            raise ValueError(f"it contains {key!r}; expected '<name>/exp_avg' or '<name>/exp_avg_sq'")
        state.setdefault(name, {})[field] = array
    return {**rest, "state": state}


_FORMATS = {
    ".npz": _Format(_npz.write, _npz.read),
    ".safetensors": _Format(_safetensors.write, _safetensors.read),
}


def refuse_what_is_no_file(path: str | os.PathLike[str], *, missing_allowed: bool = False) -> None:
    """Reading a pipe would wait for ever, and writing would replace a folder or a device."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        if not missing_allowed:
            raise
    else:
        if not stat.S_ISREG(mode):
            raise ValueError(f"{os.fspath(path)} is a {_kind(mode)}; expected a regular file")


def _kind(mode: int) -> str:
    if stat.S_ISDIR(mode):
        return "directory"
    return "pipe" if stat.S_ISFIFO(mode) else "socket" if stat.S_ISSOCK(mode) else "device"


def _format_of(path: str | os.PathLike[str]) -> _Format:
    suffix = Path(path).suffix
    if suffix not in _FORMATS:
        raise ValueError(f"{os.fspath(path)} has the suffix {suffix!r}; expected {' or '.join(_FORMATS)}")
    return _FORMATS[suffix]

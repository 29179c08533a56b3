"""Save a state to one file, ``.npz`` or ``.safetensors``, and read it back.

Both hold the arrays ``<name>/exp_avg`` and ``<name>/exp_avg_sq`` for each name and, under ``rowstep.arrays``, the rest
of the state as JSON. Nothing is pickled. A .npz carries checksums, a .safetensors file does not.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

HEADER = "rowstep.arrays"


def save(path: str | os.PathLike[str], state_dict: Mapping[str, Any]) -> None:
    """Write a state to a new file in the same folder, which then replaces what is at ``path``."""
    is_npz = _is_npz(path)
    header = json.dumps({key: value for key, value in state_dict.items() if key != "state"})
    arrays = {f"{name}/{key}": array for name, moments in state_dict["state"].items() for key, array in moments.items()}
    place = Path(os.path.realpath(path))
    # Not a file of `tempfile`, which only its owner may read: the rename would keep that.
    beside = place.with_name(f".rowstep-{secrets.token_hex(8)}.tmp")
    try:
        with open(beside, "xb") as file:
            if is_npz:
                np.savez(file, **{HEADER: np.array(header), **arrays})
            else:
                file.write(_safetensors().numpy.save(arrays, {HEADER: header}))
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, place)
    except OSError as error:
        advice = "nothing was saved, and any existing file is unchanged. Free disk space or save to another path"
        raise OSError(error.errno, f"{error.strerror or error}; {advice}", os.fspath(path)) from error
    finally:
        beside.unlink(missing_ok=True)


def load(path: str | os.PathLike[str], adopt: Callable[[dict[str, Any]], None]) -> None:
    """Read what ``save`` wrote, and hand it over. Whatever is wrong with it, the error names the file."""
    read = read_npz if _is_npz(path) else _read_safetensors
    try:
        header, arrays = read(path)
        if header is None:
            raise ValueError(f"it has no entry {HEADER!r}; expected one, as save() writes")
        state: dict[str, Any] = {}
        for key, array in arrays.items():
            name, _, field = key.rpartition("/")
            state.setdefault(name, {})[field] = array
        adopt({**json.loads(header), "state": state})
    except Exception as error:  # the readers pass on what their parsers raise, of any type
        # Errors of the disk pass as they are. EINVAL is not one: a damaged file names an impossible place in itself.
        if isinstance(error, ImportError) or (isinstance(error, OSError) and error.errno != errno.EINVAL):
            raise
        reason = str(error) or type(error).__name__
        raise ValueError(f"{os.fspath(path)} cannot be read as a state of rowstep.arrays: {reason}") from error


def _is_npz(path: str | os.PathLike[str]) -> bool:
    suffix = Path(path).suffix
    if suffix not in (".npz", ".safetensors"):
        raise ValueError(f"{os.fspath(path)} has the suffix {suffix!r}; expected .npz or .safetensors")
    return suffix == ".npz"


def read_npz(path: str | os.PathLike[str]) -> tuple[str | None, dict[str, Any]]:
    """The header, if there is one, and the arrays."""
    with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
        arrays = dict(archive)
    header = arrays.pop(HEADER, None)
    return None if header is None else str(header), arrays


def _read_safetensors(path: str | os.PathLike[str]) -> tuple[str | None, dict[str, Any]]:
    with _safetensors().safe_open(path, "np") as file:
        arrays = {key: np.array(file.get_tensor(key)) for key in list(file.keys())}
        return (file.metadata() or {}).get(HEADER), arrays


def _safetensors() -> Any:
    try:
        import safetensors.numpy
    except ImportError as error:
        raise ImportError(
            f".safetensors needs a package: {error}. Install rowstep[safetensors], or use .npz"
        ) from error
    return safetensors

"""Read a checkpoint with the readers of torch, safetensors and NumPy, told not to run code; torch's leaves the numbers
on disk until they are used.
"""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rowstep.arrays._files import HEADER, read_npz
from rowstep.cli.extras import CommandError

_CONVERT = "python -m torch.distributed.checkpoint.format_utils dcp_to_torch DIRECTORY FILE"


def read(path: Path) -> Any:
    """A tree of dicts and lists, with tensors among its leaves."""
    if path.is_dir():
        raise CommandError(f"{path}: a directory; expected a file. To convert a distributed checkpoint: {_CONVERT}")
    if path.stat() and not path.is_file():  # stat raises if there is nothing
        raise CommandError(f"{path}: a pipe or a device; expected a regular file")
    with open(path, "rb") as file:
        start = file.read(9)
    if start[8:] == b"{":
        try:
            from safetensors import safe_open
        except ImportError:
            raise CommandError(f"{path}: needs safetensors, which is not installed: pip install safetensors") from None
        with safe_open(path, framework="pt") as tensors:
            loaded = {key: tensors.get_tensor(key) for key in tensors.keys()}  # noqa: SIM118, it has no iterator
            return _as_state_dict(loaded, (tensors.metadata() or {}).get(HEADER))
    if not zipfile.is_zipfile(path):
        begins = f"begins with {start!r}" if start else "is empty"
        found = "its end is missing" if start[:2] == b"PK" else begins
        raise CommandError(f"{path}: {found}; expected a whole torch.save, .npz or .safetensors file")
    with zipfile.ZipFile(path) as archive:
        is_of_torch = any(name.endswith("/data.pkl") for name in archive.namelist())
    if is_of_torch:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    header, arrays = read_npz(path)
    return _as_state_dict({key: torch.from_numpy(array) for key, array in arrays.items()}, header)


def reason(error: Exception) -> str:
    """What is wrong with a file, in one sentence: torch's errors go on for pages."""
    if named := re.search(r"GLOBAL (\S+)", str(error)):
        return f"it holds {named[1]}, which could run code; expected state dicts, of tensors and plain containers"
    return str(error).strip().split("\n")[0].split(". ")[0] or type(error).__name__


def _as_state_dict(tensors: dict[str, Tensor], header: str | None) -> Any:
    """A state of rowstep.arrays in the form of torch's optimizers; tensors without its header as they are."""
    if header is None:
        return tensors
    options = json.loads(header)
    done = options.pop("step") - 1  # one counter for all names, of the iteration that comes next
    states: dict[str, dict[str, Any]] = {}
    for key, tensor in tensors.items():
        name, _, slot = key.rpartition("/")
        states.setdefault(name, {"step": done})[slot] = tensor
    return {"state": states, "param_groups": [{**options, "params": list(states)}]}

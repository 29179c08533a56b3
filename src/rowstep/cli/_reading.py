"""Read a checkpoint with the readers of torch, safetensors and NumPy.

Those of files run no code, and torch's leaves the numbers on disk until they are used. A directory of
torch.distributed.checkpoint is the exception: torch unpickles its ``.metadata`` and every value that is not a tensor,
which can run code. So it is read only if the user says that it can be trusted.
"""

from __future__ import annotations

import json
import math
import re
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_into

from rowstep.arrays._files import HEADER, read_npz
from rowstep.cli.extras import CommandError


@dataclass(frozen=True)
class Stored:
    """A tensor in a file, whose numbers may still be on disk."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]
    flaw: str = ""  # why the numbers cannot be read

    @property
    def nbytes(self) -> int:
        return 0 if self.flaw else math.prod(self.shape) * self.dtype.itemsize


def stored(tensor: Any) -> Any:
    """A tensor as Stored; anything else as it is."""
    if not isinstance(tensor, Tensor):
        return tensor
    is_dense = tensor.layout == torch.strided and tensor.is_cpu and not tensor.is_nested and not tensor.is_quantized
    has_numbers = is_dense and tensor.nbytes <= tensor.untyped_storage().nbytes()  # an expanded one may claim any size
    shape = () if tensor.is_nested else tuple(tensor.shape)
    return Stored(shape, tensor.dtype, tensor.detach, "" if has_numbers else "not a dense tensor with all its numbers")


def read(path: Path, trust: bool) -> Any:
    """A tree of dicts and lists whose leaves are tensors, ``Stored`` or other values."""
    if path.is_dir():
        return _read_directory(path, trust)
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
        raise CommandError(f"{path}: begins with {start!r}; expected a whole torch.save, .npz or .safetensors file")
    with zipfile.ZipFile(path) as archive:
        is_of_torch = any(name.endswith("/data.pkl") for name in archive.namelist())
    if is_of_torch:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    header, arrays = read_npz(path)
    return _as_state_dict({key: torch.from_numpy(array) for key, array in arrays.items()}, header)


def reason(error: BaseException) -> str:
    """What is wrong with a file, in one sentence: torch's errors go on for pages."""
    cause = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
    if named := re.search(r"GLOBAL (\S+)", str(cause)):
        return f"it holds {named[1]}, which could run code; expected state dicts, of tensors and plain containers"
    return str(cause).strip().split("\n")[0].split(". ")[0] or type(cause).__name__


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


def _read_directory(path: Path, trust: bool) -> Any:
    if not (path / ".metadata").exists():
        raise CommandError(f"{path}: a directory without .metadata; expected one of torch.distributed.checkpoint")
    if not trust:
        raise CommandError(
            f"{path}: torch unpickles such a directory, which can run code. If you trust it, pass --trust"
        )
    reader = FileSystemReader(path)
    metadata = reader.read_metadata()
    reader.read_metadata = lambda *_, **__: metadata  # type: ignore[method-assign]  # or each load would read it again

    def load(key: str, make_target: Callable[[], Any]) -> Any:
        target = {key: make_target()}
        load_into(target, storage_reader=reader, no_dist=True)
        return target[key]

    tree: dict[Any, Any] = {}
    for key, entry in metadata.state_dict_metadata.items():
        *way, last = (metadata.planner_data or {}).get(key, (key,))
        node = tree
        for part in way:
            node = node.setdefault(part, {})
        if isinstance(entry, TensorStorageMetadata):
            shape, dtype = tuple(entry.size), entry.properties.dtype
            node[last] = Stored(shape, dtype, partial(load, key, partial(torch.empty, shape, dtype=dtype)))
        else:
            node[last] = load(key, lambda: None)
    return tree

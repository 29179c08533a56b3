"""Files of rowstep.arrays, and any safetensors file of weights.

Of a .npz all numbers are read, because that is how its checksums are compared. A .safetensors file is read in blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rowstep.arrays import _files, _npz, _safetensors
from rowstep.cli._inspect.reading import UnreadableError
from rowstep.cli._inspect.stored import in_file

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "BOOL": torch.bool, "C64": torch.complex64,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
}  # fmt: skip


def read_npz(path: Path) -> Any:
    with open(path, "rb") as file:
        texts, arrays = _npz.read(file)
    tensors = {
        key: torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False)) for key, array in arrays.items()
    }
    return _optimizer(texts, tensors)


def read_safetensors(path: Path) -> Any:
    with open(path, "rb") as file:
        metadata, places = _safetensors.layout(file, {name: dtype.itemsize for name, dtype in _DTYPES.items()})
    tensors = {key: in_file(place.shape, _DTYPES[place.dtype], path, place.start) for key, place in places.items()}
    return _optimizer(metadata, tensors) if _files.HEADER in metadata else tensors


def _optimizer(texts: dict[str, str], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The state in the form of torch's optimizers. All names share one count, of the iteration that comes next."""
    state = _files.state_from(texts, tensors)
    slots, coming = state.pop("state"), state.pop("step", None)
    if type(coming) is not int or coming < 1:
        raise UnreadableError("its header has no count of iterations; expected 'step', a positive integer")
    return {
        "state": {name: {"step": coming - 1, **moments} for name, moments in slots.items()},
        "param_groups": [{**state, "params": list(slots)}],
    }

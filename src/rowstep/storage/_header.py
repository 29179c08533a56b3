"""Where a tensor lies in a safetensors file, and in which file of a checkpoint.

A file is eight bytes with the length of the header (little-endian), the header, and the numbers. The header is a JSON
object, which spaces may pad: for each tensor its dtype, its shape and two offsets into the numbers. Tensors lie end to
end and fill the file. The package ``safetensors`` does not tell where a tensor lies, so the header is parsed here.
"""

from __future__ import annotations

import json
import math
import os
import reprlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32,
}  # fmt: skip
_MOST_BYTES = 100_000_000  # of a header; the package has the same limit
_PAGE = 4096  # our headers fill whole pages, so that rows of 64 bytes do not straddle cache lines


class FileFormatError(ValueError):
    """A file is not an intact safetensors file, or does not have the tensor in a form that can be mapped."""


class Span(NamedTuple):
    """A tensor in a file, with its first byte and the one after its last, from the start of the file."""

    dtype: torch.dtype | None  # None if it is not one of ours
    shape: tuple[int, ...]
    begin: int
    end: int


def write(key: str, dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[bytes, Span]:
    """All bytes before the numbers of a file with one tensor, and where its numbers lie."""
    name, size = next(name for name in DTYPES if DTYPES[name] == dtype), math.prod(shape) * dtype.itemsize
    entry = {"dtype": name, "shape": shape, "data_offsets": [0, size]}
    text = json.dumps({"__metadata__": {"format": "pt"}, key: entry}).encode()  # transformers asks for that format
    text += b" " * (-(len(text) + 8) % _PAGE)
    return len(text).to_bytes(8, "little") + text, Span(dtype, shape, len(text) + 8, len(text) + 8 + size)


def find(file: int, path: str, key: str) -> Span:
    """Look a tensor up in an open file. The whole header is checked, and nothing behind it is read."""
    size, length = os.fstat(file).st_size, int.from_bytes(os.pread(file, 8, 0), "little")
    if size < 8 or length > min(_MOST_BYTES, size - 8):
        raise FileFormatError(
            f"{path} has {size} bytes and announces a header of {length}; expected a safetensors file, with a header "
            f"of at most {_MOST_BYTES} bytes. It is truncated, or something else"
        )
    entries = _json_object(os.pread(file, length, 8), f"the header of {path}")
    entries.pop("__metadata__", None)
    spans = {name: _span(entry, 8 + length, f"the tensor {name!r} of {path}") for name, entry in entries.items()}
    reached = 8 + length
    for begin, end in [*sorted((span.begin, span.end) for span in spans.values()), (size, size)]:
        if begin != reached:
            raise FileFormatError(
                f"{path} has tensors up to byte {reached}, and the next one (or the end of the file) at {begin}; "
                "expected tensors end to end that fill the file. It is truncated or damaged"
            )
        reached = end
    if key not in spans:
        raise FileFormatError(f"{path} has no tensor {key!r}; it has {str(list(spans))[:200]}")
    span = spans[key]
    if span.dtype is None or span.begin == span.end or span.begin % span.dtype.itemsize:
        raise FileFormatError(
            f"the tensor {key!r} of {path} cannot be mapped: it is {reprlib.repr(entries[key])}, from byte "
            f"{span.begin}; expected a dtype of {', '.join(DTYPES)}, at least one element, and a first byte that is a "
            "multiple of an element's size (as in files of the package safetensors)"
        )
    return span


def _span(entry: Any, start: int, what: str) -> Span:
    try:
        (begin, end), shape, dtype = entry["data_offsets"], entry["shape"], DTYPES.get(entry["dtype"])
        are_counts = all(type(number) is int and 0 <= number < 2**63 for number in [begin, end, *shape])
        # Torch has at most 64 dimensions. The product of many more would take hours.
        is_shape = isinstance(shape, list) and len(shape) <= 64 and are_counts
        if is_shape and begin <= end and (dtype is None or math.prod(shape) * dtype.itemsize == end - begin):
            return Span(dtype, tuple(shape), start + begin, start + end)
    except (KeyError, TypeError, ValueError):  # not an object, fields that are missing or not lists
        pass
    raise FileFormatError(
        f"{what} is described as {reprlib.repr(entry)}; expected a dtype, a shape and data_offsets that agree"
    )


def find_shard(path: str, key: str) -> str:
    """The file that has a tensor: ``path`` itself, or one that an index names, which a folder may have."""
    place = Path(path)
    if place.is_dir():
        found = sorted(place.glob("*.safetensors.index.json")) or sorted(place.glob("*.safetensors"))
        if len(found) != 1:
            raise FileFormatError(
                f"the folder {path} has {', '.join(each.name for each in found)[:200] or 'no such file'}; expected one "
                "*.safetensors.index.json, or one *.safetensors. Name the file to open"
            )
        place = found[0]
    if place.suffix != ".json":
        return str(place)
    shards = _json_object(place.read_bytes(), str(place)).get("weight_map")
    if isinstance(shards, dict) and key not in shards:
        raise FileFormatError(f"{place} names no file for the tensor {key!r}; it has {str(list(shards))[:200]}")
    shard = shards[key] if isinstance(shards, dict) else None
    if not (isinstance(shard, str) and shard.isprintable() and shard == Path(shard).name != ""):
        raise FileFormatError(
            f"the weight_map of {place} has {reprlib.repr(shard)} for {key!r}; expected the name of a file beside it"
        )
    return str(place.with_name(shard))


def _json_object(text: bytes, what: str) -> dict[str, Any]:
    def without_duplicates(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) < len(pairs):
            raise ValueError("a key occurs twice")
        return dict(pairs)

    try:
        found = json.loads(text.decode(), object_pairs_hook=without_duplicates)
        if isinstance(found, dict):
            return found
        reason = "it is not an object"
    except (ValueError, RecursionError) as error:
        reason = str(error)
    raise FileFormatError(f"{what} cannot be read as JSON ({reason}): it is damaged, or something else")

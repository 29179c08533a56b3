"""The safetensors format, for floats: eight bytes that hold the header's length, the header as JSON, then the numbers.

Written here rather than taken from the package of that name, which copies every array into bytes before it writes them.
The numbers lie without gaps, little-endian and in C order, each array where ``data_offsets`` says.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from ._operands import FloatArray

_METADATA = "__metadata__"
_DTYPES: dict[str, np.dtype[Any]] = {"F16": np.dtype("<f2"), "F32": np.dtype("<f4"), "F64": np.dtype("<f8")}
_NAMES = {dtype.newbyteorder("="): name for name, dtype in _DTYPES.items()}
_LONGEST_HEADER = 100_000_000  # the format's own limit


def write(file: BinaryIO, metadata: dict[str, str], arrays: dict[str, FloatArray]) -> None:
    """Write these arrays, the widest numbers first so that each is aligned."""
    header: dict[str, Any] = {_METADATA: metadata}
    keys = sorted(arrays, key=lambda key: -arrays[key].itemsize)
    end = 0
    for key in keys:
        array = arrays[key]
        start, end = end, end + array.nbytes
        header[key] = {"dtype": _NAMES[array.dtype], "shape": array.shape, "data_offsets": (start, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for key in keys:
        array = arrays[key]
        file.write(np.ascontiguousarray(array, _DTYPES[_NAMES[array.dtype]]).reshape(-1).view(np.uint8).data)


def read(file: BinaryIO) -> tuple[dict[str, str], dict[str, FloatArray]]:
    """The metadata and the arrays. Whatever breaks the format is a ValueError; nothing is allocated on its word."""
    metadata, places = layout(file, {name: dtype.itemsize for name, dtype in _DTYPES.items()})
    return metadata, {key: _read_array(file, place) for key, place in places.items()}


def layout(file: BinaryIO, itemsizes: Mapping[str, int]) -> tuple[dict[str, str], dict[str, Place]]:
    """The metadata, and where each array lies: all of it inside the file, and none on top of another.

    ``itemsizes`` has the dtypes that are accepted, by the format's names, and how many bytes a number of each takes.
    """
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(size - 8, _LONGEST_HEADER):
        raise ValueError(
            f"it has {size} bytes and claims a header of {length} bytes; expected a header that fits after the first "
            f"8 bytes and has at most {_LONGEST_HEADER}"
        )
    header = json.loads(file.read(length), object_pairs_hook=_without_duplicates)
    if not isinstance(header, dict):
        raise ValueError(f"its header is a {type(header).__name__}; expected a JSON object")
    metadata = header.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"its metadata is {metadata!r}; expected strings")
    places = {key: _place(key, entry, itemsizes, 8 + length) for key, entry in header.items()}
    end = 8 + length
    for place in sorted(places.values(), key=lambda place: (place.start, place.nbytes)):
        if place.start != end:
            found, expected = place.start - 8 - length, end - 8 - length
            raise ValueError(f"{place.key!r} begins at {found}; expected {expected}, where the array before it ends")
        end += place.nbytes
    if end != size:
        raise ValueError(f"it has {size} bytes; expected {end}")
    return metadata, places


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError(
            f"its header has a duplicate key among {[key for key, _ in pairs][:20]}; expected each key once"
        )
    return found


class Place(NamedTuple):
    """Where one array lies."""

    key: str
    dtype: str
    """By the format's name."""
    shape: tuple[int, ...]
    start: int
    """In bytes, from the beginning of the file."""
    nbytes: int


def _place(key: str, entry: Any, itemsizes: Mapping[str, int], data_start: int) -> Place:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{key!r} is {entry!r}; expected dtype, shape and data_offsets")
    if entry["dtype"] not in list(itemsizes):
        raise ValueError(f"{key!r} has dtype {entry['dtype']!r}; expected {', '.join(itemsizes)}")
    shape, offsets = _sizes(key, entry["shape"]), _sizes(key, entry["data_offsets"])
    nbytes = math.prod(shape) * itemsizes[entry["dtype"]]
    if len(offsets) != 2 or offsets[1] - offsets[0] != nbytes:
        raise ValueError(f"{key!r} has data_offsets {offsets}; expected two, {nbytes} bytes apart for shape {shape}")
    return Place(key, entry["dtype"], shape, data_start + offsets[0], nbytes)


def _read_array(file: BinaryIO, place: Place) -> FloatArray:
    file.seek(place.start)
    array = np.empty(place.shape, _DTYPES[place.dtype])
    if place.nbytes and file.readinto(array.reshape(-1).view(np.uint8).data) != place.nbytes:  # type: ignore[attr-defined]
        raise ValueError(f"{place.key!r} is truncated; expected {place.nbytes} bytes")
    return array


def _sizes(key: str, values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or not all(type(value) is int and value >= 0 for value in values):
        raise ValueError(f"{key!r} has {values!r}; expected a list of sizes")
    return tuple(values)

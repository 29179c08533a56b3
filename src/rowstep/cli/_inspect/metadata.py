"""The file ``.metadata`` of a torch.distributed.checkpoint directory, which is a pickle.

torch's own reader runs whatever the pickle asks for. This one makes nothing but inert records: each class that torch
writes there has a stand-in without behaviour, and any other name is refused.
"""

from __future__ import annotations

import collections
import io
import pickle
from dataclasses import dataclass
from typing import Any

import torch

from rowstep.cli._inspect.reading import UnreadableError

_DCP = "torch.distributed.checkpoint"


class _Record:
    """What the pickle says of an object, kept as it is."""

    fields: Any = None

    def __new__(cls, *_: object) -> _Record:
        return object.__new__(cls)

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, fields: Any) -> None:
        self.fields = fields


class _Metadata(_Record): ...


class _Tensor(_Record): ...


class _Bytes(_Record): ...


class _Chunk(_Record): ...


class _Properties(_Record): ...


class _Index(_Record): ...


class _Storage(_Record): ...


_STAND_INS: dict[tuple[str, str], Any] = {
    (f"{_DCP}.metadata", "Metadata"): _Metadata,
    (f"{_DCP}.metadata", "TensorStorageMetadata"): _Tensor,
    (f"{_DCP}.metadata", "BytesStorageMetadata"): _Bytes,
    (f"{_DCP}.metadata", "ChunkStorageMetadata"): _Chunk,
    (f"{_DCP}.metadata", "TensorProperties"): _Properties,
    (f"{_DCP}.metadata", "MetadataIndex"): _Index,
    (f"{_DCP}.metadata", "StorageMeta"): _Record,
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"): _Record,
    (f"{_DCP}.filesystem", "_StorageInfo"): _Storage,
    (f"{_DCP}.filesystem", "_StoragePrefix"): _Record,
    ("torch", "Size"): tuple,
    ("torch", "device"): _Record,
    ("torch.serialization", "_get_layout"): _Record,
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("pathlib", "PosixPath"): _Record,
    ("pathlib", "WindowsPath"): _Record,
    ("pathlib._local", "PosixPath"): _Record,
    ("pathlib._local", "WindowsPath"): _Record,
}


# The unpickler in Python, not the one in C: five bytes that ask for place 1 << 26 in its memo cost that one 1 GB.
class _Unpickler(pickle._Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(kind := vars(torch).get(name), torch.dtype):
            return kind
        if (module, name) not in _STAND_INS:
            raise UnreadableError(
                f".metadata asks for {module}.{name}, which torch.distributed.checkpoint does not write there and "
                "which is not loaded; expected its own records only"
            )
        return _STAND_INS[module, name]


@dataclass(frozen=True)
class Item:
    """Where something lies: bytes of a file in the directory."""

    file: str
    start: int
    length: int
    is_transformed: bool


@dataclass(frozen=True)
class Chunk:
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    item: Item


@dataclass(frozen=True)
class Entry:
    """One leaf of the state dict that was saved."""

    path: tuple[Any, ...]
    dtype: torch.dtype | None = None
    """None if it is no tensor; then it has one chunk."""
    shape: tuple[int, ...] = ()
    chunks: tuple[Chunk, ...] = ()


def read(data: bytes) -> list[Entry]:
    """What a checkpoint has, by what its metadata says."""
    metadata = _Unpickler(io.BytesIO(data)).load()
    whole = _fields(metadata, _Metadata)
    paths = whole.get("planner_data")
    paths = paths if isinstance(paths, dict) else {}
    items = _items(whole.get("storage_data"))
    entries = []
    for key, record in _checked(whole.get("state_dict_metadata"), dict).items():
        path = paths.get(_checked(key, str), (key,))
        path = path if isinstance(path, tuple) and path else (key,)
        if isinstance(record, _Tensor):
            entries.append(_tensor(key, path, _fields(record, _Tensor), items))
        elif (key, None) in items:
            entries.append(Entry(path, chunks=(Chunk((), (), items[key, None]),)))
    return entries


_Items = dict[tuple[str, tuple[int, ...] | None], Item]


def _items(storage_data: Any) -> _Items:
    items: _Items = {}
    for index, storage in _checked(storage_data, dict).items():
        which, where = _fields(index, _Index), _fields(storage, _Storage)
        offset = which.get("offset")
        start, length = _sizes((where.get("offset"), where.get("length")))
        file, is_transformed = _checked(where.get("relative_path"), str), bool(where.get("transform_descriptors"))
        key = _checked(which.get("fqn"), str), None if offset is None else _sizes(offset)
        items[key] = Item(file, start, length, is_transformed)
    return items


def _tensor(key: str, path: tuple[Any, ...], fields: dict[str, Any], items: _Items) -> Entry:
    properties = getattr(fields.get("properties"), "fields", None)
    dtype = properties[0] if isinstance(properties, tuple) and properties else None
    chunks = []
    for record in _checked(fields.get("chunks"), list):
        chunk = _fields(record, _Chunk)
        offsets, shape = _sizes(chunk.get("offsets")), _sizes(chunk.get("sizes"))
        item = items.get((key, offsets)) or items.get((key, None))
        if item is None or len(offsets) != len(shape):
            raise UnreadableError(f".metadata has no place for {key!r} at {offsets}; expected one for each chunk")
        chunks.append(Chunk(offsets, shape, item))
    return Entry(path, _checked(dtype, torch.dtype), _sizes(fields.get("size")), tuple(chunks))


def _fields(record: Any, kind: type[_Record]) -> dict[str, Any]:
    fields: dict[str, Any] = _checked(_checked(record, kind).fields, dict)
    return fields


def _checked(value: Any, kind: type[Any]) -> Any:
    if not isinstance(value, kind):
        expected = kind.__name__.strip("_")
        raise UnreadableError(f".metadata has a {type(value).__name__.strip('_')}; expected a {expected}")
    return value


def _sizes(values: Any) -> tuple[int, ...]:
    if not isinstance(values, tuple) or not all(type(size) is int and 0 <= size < 1 << 62 for size in values):
        raise UnreadableError(".metadata has sizes that are no tuple of integers in [0, 2^62); expected such a tuple")
    return values

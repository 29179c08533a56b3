"""The .npz format: a ZIP archive of .npy files, stored as they are, with a checksum each.

``numpy.load`` would read it too. But it allocates what a header claims, and it lets errors of the ZIP reader through; a
file may be damaged or hostile. Here every size is held against the file before memory is taken.
"""

from __future__ import annotations

import math
import os
import zipfile
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ._operands import FLOATS, FloatArray, native

_BLOCK = 1 << 20  # bytes read at a time; the ZIP reader hands out copies


def write(file: BinaryIO, texts: dict[str, str], arrays: dict[str, FloatArray]) -> None:
    """Write these texts and arrays."""
    with zipfile.ZipFile(file, "w") as archive:
        for key, array in {**{key: np.array(text) for key, text in texts.items()}, **arrays}.items():
            with archive.open(f"{key}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def read(file: BinaryIO) -> tuple[dict[str, str], dict[str, FloatArray]]:
    """The texts and the arrays. What breaks the format is an error of some kind; nothing is allocated on its word."""
    texts: dict[str, str] = {}
    arrays: dict[str, FloatArray] = {}
    with zipfile.ZipFile(file) as archive:
        for info in checked_members(archive, os.fstat(file.fileno()).st_size):
            key = info.filename.removesuffix(".npy")
            with archive.open(info) as member:
                array = _read_array(key, member, info.file_size)
            if array.dtype.kind == "U":
                texts[key] = str(array)
            else:
                arrays[key] = array
    return texts, arrays


def checked_members(archive: zipfile.ZipFile, size: int) -> list[zipfile.ZipInfo]:
    """What the archive holds, once all of it can be in a file of this size."""
    members = archive.infolist()
    seen: set[str] = set()
    for info in members:
        if info.filename in seen:
            raise ValueError(f"it contains {info.filename} twice; expected each entry once")
        seen.add(info.filename)
        if info.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"{info.filename} is compressed; expected an uncompressed entry, as save() writes")
        if not (0 <= info.header_offset < size and info.file_size == info.compress_size):
            raise ValueError(
                f"{info.filename} claims {info.file_size} bytes, stored as {info.compress_size} at offset "
                f"{info.header_offset}; expected equal sizes, at an offset inside the file's {size} bytes"
            )
    claimed = sum(info.file_size for info in members)  # members on top of each other could claim any number of times it
    if claimed > size:
        raise ValueError(f"it has {size} bytes; expected at least {claimed}, the total of its entries")
    return members


def _read_array(key: str, member: Any, size: int) -> NDArray[Any]:
    """The one array of a .npy file of this many bytes."""
    version = np.lib.format.read_magic(member)
    if version != (1, 0):
        raise ValueError(f"{key!r} has .npy format version {version}; expected (1, 0)")
    shape, fortran, dtype = np.lib.format.read_array_header_1_0(member)
    if native(dtype) not in FLOATS and not (dtype.kind == "U" and shape == ()):
        raise ValueError(f"{key!r} has dtype {dtype} and shape {shape}; expected floats or a single string")
    expected = member.tell() + math.prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or expected != size:
        raise ValueError(f"{key!r} has {size} bytes; expected {expected} for the shape {shape}")
    array = np.empty(shape, dtype, "F" if fortran else "C")
    memory = array.reshape(-1, order="A").view(np.uint8).data if array.nbytes else memoryview(b"")
    filled = 0
    while block := member.read(_BLOCK):  # at the end of the member its checksum is compared
        memory[filled : filled + len(block)] = block
        filled += len(block)
    if filled != len(memory):
        raise ValueError(f"{key!r} is truncated; expected {expected} bytes")
    return array

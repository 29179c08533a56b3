"""Files that are not what they seem: each is refused in a sentence, or read as the package safetensors reads it."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

from rowstep import storage

TENSORS = {
    "weight": torch.arange(12, dtype=torch.float32).view(3, 4),
    "bias": torch.arange(5, dtype=torch.bfloat16),
    "counts": torch.arange(3),
    "flags": torch.tensor([True, False, True]),
}
GOOD = save(TENSORS, {"format": "pt"})
LENGTH = int.from_bytes(GOOD[:8], "little")
HEADER: dict[str, Any] = json.loads(GOOD[8 : 8 + LENGTH])
NUMBERS = GOOD[8 + LENGTH :]

ODD_VALUES: list[Any] = [
    None, True, -1, 0, 1, 7, 8, 2**31, 2**62, 2**63, 2**64, 10**30, 0.5, 12.0, "", "F32", "F64", "BF16", "XYZ", "I64",
    [], [0], [0, 0], [3, 4], [4, 3], [12], [2**62, 4], [-3, -4], [0, 48], [48, 0], [[3], [4]], [1] * 70, {}, {"a": 1},
    "\ud800",
]  # fmt: skip


def file_of(text: bytes, numbers: bytes = NUMBERS) -> bytes:
    return len(text).to_bytes(8, "little") + text + numbers


def change_a_field(rng: random.Random) -> bytes:
    header = json.loads(json.dumps(HEADER))
    for _ in range(rng.randint(1, 2)):
        entry = header[rng.choice(list(TENSORS))]
        field = rng.choice([*entry, "extra"])
        if isinstance(entry.get(field), list) and entry[field] and rng.random() < 0.5:
            entry[field][rng.randrange(len(entry[field]))] = rng.choice(ODD_VALUES)
        elif rng.random() < 0.2:
            entry.pop(field, None)
        else:
            entry[field] = rng.choice(ODD_VALUES)
    return file_of(json.dumps(header).encode())


def change_an_entry(rng: random.Random) -> bytes:
    header: dict[str, Any] = dict(HEADER)
    header[rng.choice([*HEADER, "new", ""])] = rng.choice([*ODD_VALUES, *HEADER.values()])
    if rng.random() < 0.3:
        del header[rng.choice(list(header))]
    return file_of(json.dumps(header).encode())


def change_a_byte(rng: random.Random) -> bytes:
    changed = bytearray(GOOD)
    for _ in range(rng.randint(1, 4)):
        changed[rng.randrange(8 + LENGTH)] = rng.randrange(256)
    return bytes(changed)


def change_the_length(rng: random.Random) -> bytes:
    length = rng.choice([0, 1, LENGTH - 1, LENGTH + 1, LENGTH + 8, len(GOOD), 10**8, 10**8 + 1, 2**63, 2**64 - 1])
    return length.to_bytes(8, "little") + GOOD[8:]


def cut_or_append(rng: random.Random) -> bytes:
    return GOOD[: rng.randrange(len(GOOD))] if rng.random() < 0.7 else GOOD + rng.randbytes(rng.randint(1, 99))


def repeat_a_key(rng: random.Random) -> bytes:
    key = rng.choice(list(TENSORS))
    text = json.dumps(HEADER)[:-1] + f", {json.dumps(key)}: {json.dumps(HEADER[rng.choice(list(TENSORS))])}}}"
    return file_of(text.encode())


def write_something_else(rng: random.Random) -> bytes:
    texts = [
        b"",
        b"{}",
        b"[]",
        b"null",
        b"{" * 50_000,
        b'{"weight":' * 900 + b"{}" + b"}" * 900,
        b"[" * 99_999,
        b" " * 99,
    ]
    texts += [b'\xff\xfe{"a": 1}', b'{"weight": NaN}', b'{"weight": ' + b"9" * 9_999 + b"}", rng.randbytes(200)]
    return rng.choice([file_of(rng.choice(texts)), rng.choice(texts), rng.randbytes(rng.randrange(300))])


MUTATIONS: list[Callable[[random.Random], bytes]] = [
    change_a_field, change_a_field, change_a_field, change_an_entry, change_a_byte, change_a_byte, change_the_length,
    cut_or_append, repeat_a_key, write_something_else,
]  # fmt: skip


@pytest.mark.parametrize("mutate", dict.fromkeys(MUTATIONS), ids=lambda mutate: mutate.__name__)
def test_hostile_files(tmp_path: Path, mutate: Callable[[random.Random], bytes]) -> None:
    rng = random.Random(mutate.__name__)
    for number in range(100 * MUTATIONS.count(mutate)):
        path = tmp_path / f"{number}.safetensors"
        path.write_bytes(mutate(rng))
        for key in ("weight", "bias"):
            try:
                tensor = storage.open(path, key, writable=number % 10 == 0)
            except storage.FileFormatError as error:
                is_a_sentence = re.search(
                    r"[a-z]{3} .*(; expected |\(.*\): it is |has no tensor)", str(error), re.DOTALL
                )
                is_right = bool(is_a_sentence) and len(str(error)) < 1_000
            else:
                is_right = torch.equal(tensor, by_the_package(path, key))
            assert is_right, path.read_bytes()


def by_the_package(path: Path, key: str) -> torch.Tensor:
    """Of a file with this tensor alone: the package is as strict with what is beside it, such as metadata."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    entry = json.loads(data[8 : 8 + length])[key]
    begin, end = entry["data_offsets"]
    alone = json.dumps(
        {key: {"dtype": entry["dtype"], "shape": entry["shape"], "data_offsets": [0, end - begin]}}
    ).encode()
    return load(file_of(alone, data[8 + length :][begin:end]))[key]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"weight": ("F32", [2], [0, 8]), "other": ("F32", [2], [4, 12])}, "up to byte .* and the next one .* at"),
        ({"weight": ("F32", [2], [0, 8]), "other": ("F32", [1], [12, 16])}, "expected tensors end to end that fill"),
        (
            {"weight": ("F32", [2], [0, 8])},
            "expected tensors end to end that fill the file. It is truncated or damaged",
        ),
        ({"weight": ("F32", [4], [0, 32])}, "expected tensors end to end|that agree"),
        ({"weight": ("F32", [3], [0, 16])}, "expected a dtype, a shape and data_offsets that agree"),
        ({"weight": ("U8", [16], [0, 16])}, "cannot be mapped: .*'U8'.* expected a dtype of F64, F32"),
        (
            {"weight": ("F32", [0, 2], [0, 0]), "other": ("F32", [4], [0, 16])},
            "expected a dtype .* at least one element",
        ),
        ({"odd": ("U8", [1], [0, 1]), "weight": ("F32", [3], [1, 13]), "end": ("U8", [3], [13, 16])}, "multiple of an"),
        ({"other": ("F32", [4], [0, 16])}, r"has no tensor 'weight'; it has \['other'\]"),
    ],
)
def test_errors_say_what_is_wrong(tmp_path: Path, entries: dict[str, tuple[Any, ...]], message: str) -> None:
    header = {key: dict(zip(("dtype", "shape", "data_offsets"), entry, strict=True)) for key, entry in entries.items()}
    text = json.dumps(header).encode()
    (tmp_path / "a.safetensors").write_bytes(file_of(text + b" " * (-len(text) % 8), bytes(16)))
    with pytest.raises(storage.FileFormatError, match=message):
        storage.open(tmp_path / "a.safetensors", "weight")


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    attempts: list[tuple[Path, type[Exception] | tuple[type[Exception], ...]]] = [
        (tmp_path / "pipe", (OSError, storage.FileFormatError)),
        (Path("/dev/zero"), storage.FileFormatError),
        (tmp_path / "missing", FileNotFoundError),
        (tmp_path / "missing.json", FileNotFoundError),
    ]
    for path, error in attempts:
        for writable in (False, True):
            with pytest.raises(error, match=str(path)):
                storage.open(path, "weight", writable=writable)
    for path, message in [(tmp_path, "File exists; choose another path"), (tmp_path / "no" / "a", "No such file")]:
        with pytest.raises(OSError, match=message):
            storage.create(path, 3, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": 0}, r"the shape is \(0, 2\); expected integers of at least 1"),
        ({"dim": 2.0}, r"the shape is \(3, 2.0\)"),
        ({"dim": (2, -1)}, r"the shape is \(3, 2, -1\)"),
        ({"rows": True}, r"the shape is \(True, 2\)"),
        ({"rows": 2**62}, r"takes 368934881\d+ bytes; expected less than 2\*\*63"),
        ({"dtype": torch.bool}, "dtype is torch.bool; expected one of torch.float64"),
        ({"key": ""}, "key is ''; expected a name"),
        ({"key": "__metadata__"}, "key is '__metadata__'"),
    ],
)
def test_a_table_that_cannot_be(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        storage.create(tmp_path / "a", **{"rows": 3, "dim": 2, **options})
    assert list(tmp_path.iterdir()) == []

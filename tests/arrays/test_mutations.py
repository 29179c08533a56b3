"""rowstep.arrays: files that were damaged, or made to do harm. They are refused, or what they load is a valid state.

A load raises nothing but a ValueError that names the file, and an error changes nothing. `make stress` tries 10,000
damaged and 10,000 hostile files of each format.
"""

from __future__ import annotations

import copy
import json
import math
import zipfile
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from rowstep.arrays import Adam
from tests.arrays.test_files import SUFFIXES, contents, same, trained, write
from tests.helpers.deferred_cases import LONG

pytestmark = pytest.mark.usefixtures("reference_backend")

FILES = 10_000 if LONG else 200


def bits_flipped(data: bytes, random: Random) -> bytes:
    changed = bytearray(data)
    for _ in range(random.choice((1, 1, 1, 2, 8))):
        changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
    return bytes(changed)


def truncated(data: bytes, random: Random) -> bytes:
    return data[: random.randrange(len(data))]


def bytes_filled(data: bytes, random: Random) -> bytes:
    """Lengths, offsets and signs are made extreme."""
    at, length = random.randrange(len(data)), random.choice((1, 2, 4, 8))
    return data[:at] + random.choice((b"\0", b"\x7f", b"\x80", b"\xff")) * length + data[at + length :]


def block_cut(data: bytes, random: Random) -> bytes:
    start = random.randrange(len(data))
    return data[:start] + data[start + random.randrange(1, 300) :]


DAMAGES = (bits_flipped, truncated, bytes_filled, block_cut)

HOSTILE: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**63, 10**40, 0.5, -0.0, 1e308, math.nan, math.inf, "", "0.1", "\0", [], [0, 0], [0.5, 0.5],
    [[]], {},
)  # fmt: skip
HOSTILE_ARRAYS: tuple[Any, ...] = (
    np.zeros(3), np.full((6, 4), -1.0), np.zeros((6, 4), np.float32), np.zeros(3, int), np.zeros((0, 7)),
)  # fmt: skip
HOSTILE_KEYS = ("a/exp_avg", "a", "/", "", "/exp_avg", "rowstep.arrays/exp_avg", "../a/exp_avg_sq")


def hostile(header: str, arrays: dict[str, Any], random: Random) -> tuple[str, dict[str, Any]]:
    """A well-formed file with one thing replaced, taken away or renamed."""
    rest, arrays = json.loads(header), copy.copy(arrays)
    way = random.randrange(6)
    key = random.choice(list(rest if way < 3 else arrays))
    if way == 0:
        rest = random.choice(HOSTILE)
    elif way == 1:
        del rest[key]
    elif way == 2:
        rest[key] = random.choice(HOSTILE)
    elif way == 3:
        del arrays[key]
    elif way == 4:
        arrays[random.choice(HOSTILE_KEYS)] = arrays.pop(key)
    else:
        arrays[key] = random.choice(HOSTILE_ARRAYS)
    return json.dumps(rest), arrays


def assert_refused_or_valid(path: Path) -> bool:
    """Load a file; return whether it loaded."""
    optimizer = Adam(lr=0.25)
    try:
        optimizer.load(path)
    except ValueError as error:
        assert str(path) in str(error)  # noqa: PT017  it may also load
        assert same(optimizer.state_dict(), Adam(lr=0.25).state_dict())
        return False
    state = optimizer.state_dict()
    assert type(state["step"]) is int
    assert 1 <= state["step"] < 2**63
    for name, moments in state["state"].items():
        m, v = moments["exp_avg"], moments["exp_avg_sq"]
        assert (m.shape, m.dtype) == (v.shape, v.dtype)
        assert m.dtype in ("float16", "float32", "float64")
        assert not (v < 0).any()
        optimizer.step(name, np.ones(m.shape, m.dtype), np.zeros(m.shape))
    return True


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_damaged_files_are_refused_or_valid(suffix: str, tmp_path: Path) -> None:
    path, random, refused = tmp_path / f"state{suffix}", Random(1), 0
    trained().save(path)
    data = path.read_bytes()
    assert assert_refused_or_valid(path)
    for number in range(FILES):
        path.write_bytes(DAMAGES[number % len(DAMAGES)](data, random))
        refused += not assert_refused_or_valid(path)
    assert refused > FILES / 2


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_hostile_files_are_refused_or_valid(suffix: str, tmp_path: Path) -> None:
    path, random, refused = tmp_path / f"state{suffix}", Random(2), 0
    trained().save(path)
    header, arrays = contents(path)
    for _ in range(FILES):
        write(path, *hostile(header, arrays, random))
        refused += not assert_refused_or_valid(path)
    assert FILES / 2 < refused < FILES


@pytest.mark.parametrize("shape", ["(10**9,)", "(1000000000000, 1000)", "(-1,)"])
def test_a_npz_whose_array_claims_what_it_has_not(shape: str, tmp_path: Path) -> None:
    text = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    with zipfile.ZipFile(tmp_path / "state.npz", "w") as archive:
        archive.writestr("w/exp_avg.npy", b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text)
    assert not assert_refused_or_valid(tmp_path / "state.npz")

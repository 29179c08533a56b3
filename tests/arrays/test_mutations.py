"""rowstep.arrays: files that were damaged, or made to do harm. They are refused, or what they load is a valid state.

A load raises nothing but a ValueError that names the file. `make stress` tries 10,000 + 10,000 files of each format.
"""

from __future__ import annotations

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


def hostile(header: str, arrays: dict[str, Any], random: Random) -> tuple[str, dict[str, Any]]:
    """A well-formed file with one thing replaced, taken away or renamed."""
    rest, arrays = json.loads(header), dict(arrays)
    entries: dict[str, Any] = random.choice((rest, arrays))
    key, way = random.choice(list(entries)), random.randrange(4)
    if way == 0:
        return json.dumps(random.choice(HOSTILE)), arrays
    value = entries.pop(key)
    if way == 1:
        entries[key] = random.choice(HOSTILE if entries is rest else HOSTILE_ARRAYS)
    elif way == 2:
        entries[random.choice(("a/exp_avg", "a", "/", "", "/exp_avg", "../a/exp_avg_sq"))] = value
    return json.dumps(rest), arrays


def assert_refused_or_valid(path: Path) -> bool:
    """Load a file; return whether it loaded."""
    optimizer = Adam(lr=0.25)
    try:
        optimizer.load(path)
    except ValueError as error:
        assert str(path) in str(error)  # noqa: PT017  it may also load
        assert same(optimizer, Adam(lr=0.25))
        return False
    state = optimizer.state_dict()
    assert 1 <= state["step"] < 2**63
    for name, moments in state["state"].items():
        m, v = moments["exp_avg"], moments["exp_avg_sq"]
        assert (m.shape, m.dtype) == (v.shape, v.dtype)
        assert not (v < 0).any()
        optimizer.step(name, np.ones(m.shape, m.dtype), np.zeros(m.shape))
    return True


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_changed_files_are_refused_or_valid(suffix: str, tmp_path: Path) -> None:
    path, random = tmp_path / f"state{suffix}", Random(1)
    trained().save(path)
    assert assert_refused_or_valid(path)
    data, (header, arrays), damaged, changed = path.read_bytes(), contents(path), 0, 0
    for number in range(FILES):
        path.write_bytes(DAMAGES[number % len(DAMAGES)](data, random))
        damaged += not assert_refused_or_valid(path)
        write(path, *hostile(header, arrays, random))
        changed += not assert_refused_or_valid(path)
    assert min(damaged, changed) > FILES / 2


@pytest.mark.parametrize("shape", ["(10**9,)", "(1000000000000, 1000)", "(-1,)"])
def test_a_npz_whose_array_claims_what_it_has_not(shape: str, tmp_path: Path) -> None:
    text = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    with zipfile.ZipFile(tmp_path / "state.npz", "w") as archive:
        archive.writestr("w/exp_avg.npy", b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text)
    assert not assert_refused_or_valid(tmp_path / "state.npz")

"""rowstep.arrays: files that were damaged, or made to do harm. They are refused, or what they load is a valid state.

Every load is watched: it raises nothing but a ValueError that names the file, an error changes nothing, and the memory
taken is at most a few times the file. `make stress` tries 10,000 damaged and 10,000 hostile files of each format.
"""

from __future__ import annotations

import copy
import io
import json
import math
import tracemalloc
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from rowstep.arrays import Adam
from tests.arrays.test_files import same, trained
from tests.helpers.deferred_cases import LONG

FILES = 10_000 if LONG else 200

# What parsing takes beside the arrays: the text of a header as objects, a block of a .npz.
MEMORY = 3 << 20


@pytest.fixture(autouse=True)
def _reference_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROWSTEP_BACKEND", "reference")


def whole(suffix: str, folder: Path) -> bytes:
    path = folder / f"whole{suffix}"
    trained().save(path)
    return path.read_bytes()


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


def blocks_swapped(data: bytes, random: Random) -> bytes:
    length = random.randrange(1, min(200, len(data)))
    first, second = sorted(random.randrange(len(data) - length) for _ in range(2))
    blocks = data[first : first + length], data[second : second + length]
    return data[:first] + blocks[1] + data[first + length : second] + blocks[0] + data[second + length :]


def block_repeated(data: bytes, random: Random) -> bytes:
    start, length = random.randrange(len(data)), random.randrange(1, 300)
    at = random.choice((start + length, random.randrange(len(data))))
    return data[:at] + data[start : start + length] + data[at:]


def block_cut(data: bytes, random: Random) -> bytes:
    start = random.randrange(len(data))
    return data[:start] + data[start + random.randrange(1, 300) :]


DAMAGES = (bits_flipped, truncated, bytes_filled, blocks_swapped, block_repeated, block_cut)

HOSTILE: tuple[Any, ...] = (
    None, True, -1, 0, 1, 7, 2**31, 2**40, 2**63, 10**40, -(10**400), 0.5, -0.0, 1e308, math.nan, math.inf, -math.inf,
    "", "0.1", "00", "F32", "F64", "I64", "a/exp_avg", "\0", "\ud800", [], [0, 0], [0.5, 0.5], [2**20, 2**20],
    [0, 2**62], [1] * 70, [[]], {}, {"": {}}, {"rowstep.arrays": "{}"},
)  # fmt: skip


def something_replaced(value: Any, random: Random) -> Any:
    """The JSON value with one thing in it replaced, taken away, doubled or renamed."""
    if not isinstance(value, (dict, list)) or not value or random.random() < 0.1:
        return random.choice(HOSTILE)
    changed: Any = copy.copy(value)
    key = random.choice(list(value)) if isinstance(value, dict) else random.randrange(len(value))
    way = random.randrange(6)
    if way == 0:
        del changed[key]
    elif way == 1 and isinstance(value, dict):
        changed[random.choice((random.choice(list(value)), "a/exp_avg", "a", "/"))] = changed.pop(key)
    elif way == 2 and isinstance(value, dict):
        changed[random.choice(list(value))] = value[key]
    else:
        changed[key] = something_replaced(value[key], random)
    return changed


def hostile_safetensors(data: bytes, random: Random) -> bytes:
    """A header of another meaning, over the same numbers."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    if random.random() < 0.5:
        state = something_replaced(json.loads(header["__metadata__"]["rowstep.arrays"]), random)
        header["__metadata__"]["rowstep.arrays"] = json.dumps(state)
    else:
        header = something_replaced(header, random)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def hostile_npz(data: bytes, random: Random) -> bytes:
    """Other members, with checksums that are right."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = [(name, archive.read(name)) for name in archive.namelist()]
    number = random.randrange(len(members))
    name, content = members[number]
    way = random.randrange(8)
    if way == 0:
        members[number] = name, random.choice(DAMAGES)(content, random)
    elif way == 1:
        members.append(random.choice(members))
    elif way == 2:
        members[number] = (
            random.choice((random.choice(members)[0], "a/exp_avg.npy", "a.npy", "/", "../a/exp_avg")),
            content,
        )
    elif way == 3:
        del members[number]
    elif way == 4:
        members[number] = name, random.choice(members)[1]
    elif way == 5:
        state = something_replaced(json.loads(str(np.load(io.BytesIO(members[0][1])))), random)
        members[0] = members[0][0], npy(np.array(json.dumps(state)))
    else:
        members[number] = name, with_claims(content, random)
    random.shuffle(members)
    packed = number if random.random() < 0.1 else -1
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # members of one name are what is wanted
        with zipfile.ZipFile(file, "w") as archive:
            for place, (member, content) in enumerate(members):
                archive.writestr(member, content, zipfile.ZIP_DEFLATED if place == packed else zipfile.ZIP_STORED)
    return file.getvalue()


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def with_claims(content: bytes, random: Random) -> bytes:
    """The numbers of a .npy file under another header."""
    length = int.from_bytes(content[8:10], "little")
    descr = random.choice(("'<f4'", "'>f8'", "'|O'", "'<U1000000000'", "'<c16'", "[('a', '<f4')]", "'?'", "3", "'V8'"))
    shape = random.choice(
        ("()", "(24,)", "(-1,)", "(6, -4)", "(10**9,)", "(1000000000, 1000)", "(0, 99999999999)", "x")
    )
    header = (
        f"{{'descr': {descr}, 'fortran_order': {random.choice(('True', 'False', '1'))}, 'shape': {shape}, }}".encode()
    )
    return content[:8] + len(header).to_bytes(2, "little") + header + content[10 + length :]


HOSTILES: dict[str, Callable[[bytes, Random], bytes]] = {".npz": hostile_npz, ".safetensors": hostile_safetensors}


def assert_refused_or_valid(path: Path, data: bytes) -> bool:
    """Load a file; return whether it loaded."""
    path.write_bytes(data)
    optimizer = Adam(lr=0.25)
    tracemalloc.start()
    try:
        optimizer.load(path)
        message = ""
    except ValueError as error:
        message = str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak <= 4 * len(data) + MEMORY
    if message:
        assert str(path) in message
        assert same(optimizer.state_dict(), Adam(lr=0.25).state_dict())
    else:
        assert_valid(optimizer)
    return not message


def assert_valid(optimizer: Adam) -> None:
    state = optimizer.state_dict()
    assert type(state["step"]) is int
    assert 1 <= state["step"] < 2**63
    Adam(**{key: state[key] for key in ("lr", "betas", "eps", "weight_decay")})
    arrays = [array for moments in state["state"].values() for array in moments.values()]
    for name, moments in state["state"].items():
        assert type(name) is str
        assert list(moments) == ["exp_avg", "exp_avg_sq"]
        m, v = moments.values()
        assert m.shape == v.shape
        assert m.dtype == v.dtype
        assert m.dtype in ("float16", "float32", "float64")
        assert m.dtype.isnative
        assert m.flags.writeable
        assert not (v < 0).any()
        optimizer.step(name, np.ones(m.shape, m.dtype), np.zeros(m.shape))
    assert not any(np.may_share_memory(one, other) for one in arrays for other in arrays if one is not other)


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_damaged_files_are_refused_or_valid(suffix: str, tmp_path: Path) -> None:
    data, random = whole(suffix, tmp_path), Random(1)
    assert assert_refused_or_valid(tmp_path / f"state{suffix}", data)
    refused = 0
    for number in range(FILES):
        damage = DAMAGES[number % len(DAMAGES)]
        refused += not assert_refused_or_valid(tmp_path / f"state{suffix}", damage(data, random))
    assert refused > FILES / 2


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_hostile_files_are_refused_or_valid(suffix: str, tmp_path: Path) -> None:
    data, random = whole(suffix, tmp_path), Random(2)
    refused = 0
    for _ in range(FILES):
        refused += not assert_refused_or_valid(tmp_path / f"state{suffix}", HOSTILES[suffix](data, random))
    assert FILES / 2 < refused < FILES


def test_members_on_top_of_each_other_take_no_memory(tmp_path: Path) -> None:
    """A thousand entries of the directory that all name the same million bytes."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a/exp_avg.npy", npy(np.zeros(125_000)))
        info = archive.infolist()[0]
        for number in range(1000):
            alias = copy.copy(info)
            alias.filename = f"{number}/exp_avg.npy"
            archive.filelist.append(alias)
    assert not assert_refused_or_valid(tmp_path / "state.npz", file.getvalue())


def test_a_place_before_the_file_is_no_error_of_the_disk(tmp_path: Path) -> None:
    data = bytearray(whole(".npz", tmp_path))
    directory = data.rindex(b"PK\x05\x06") + 16
    for offset in (0, 2**31, 2**32 - 1):
        data[directory : directory + 4] = offset.to_bytes(4, "little")
        assert not assert_refused_or_valid(tmp_path / "state.npz", bytes(data))

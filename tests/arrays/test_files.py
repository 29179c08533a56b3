"""rowstep.arrays: states as dicts and as files. A crash leaves the old file, a bad file the old optimizer."""

from __future__ import annotations

import json
import os
import pickle
import stat
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowstep.arrays import Adam, AdamW, _files, _safetensors

SUFFIXES = (".npz", ".safetensors")


@pytest.fixture(autouse=True)
def _reference_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files do not depend on the backend: compile nothing."""
    monkeypatch.setenv("ROWSTEP_BACKEND", "reference")


def parameters() -> dict[str, Any]:
    """One of each kind, under names that only a careless format would confuse."""
    numbers = np.random.default_rng(0).standard_normal(24)
    return {
        "layers/0.weight": numbers.reshape(6, 4).astype(np.float32),
        "layers/0.weight.npy": np.asfortranarray(numbers.reshape(6, 4)),
        "": numbers.astype(np.float16),
        "__metadata__": np.array(0.5),
        "rowstep.arrays": np.zeros((0, 3)),
        "größe \\ 大きさ/exp_avg": numbers[::2].copy(),
    }


def train(optimizer: Adam, params: dict[str, Any], iterations: int) -> None:
    for _ in range(iterations):
        for name, param in params.items():
            optimizer.step(name, param, np.sin(param * optimizer.current_step))
        optimizer.end_iteration()


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two state dicts hold the same, to the bit."""
    settings = all(one[key] == other[key] for key in one if key != "state")
    return settings and one["state"].keys() == other["state"].keys() and all(
        array.dtype == other["state"][name][key].dtype and np.array_equal(array, other["state"][name][key])
        for name, moments in one["state"].items()
        for key, array in moments.items()
    )  # fmt: skip


def trained(kind: type[Adam] = Adam) -> Adam:
    optimizer = kind(lr=0.1, betas=(0.5, 0.7), eps=1e-5, weight_decay=0.3)
    train(optimizer, parameters(), 3)
    return optimizer


@pytest.mark.parametrize("way", ["dict", *SUFFIXES])
@pytest.mark.parametrize("kind", [Adam, AdamW])
def test_a_run_goes_on_as_if_it_had_not_stopped(kind: type[Adam], way: str, tmp_path: Path) -> None:
    through, stopped = parameters(), parameters()
    optimizer, before, after = kind(lr=0.1, weight_decay=0.3), kind(lr=0.1, weight_decay=0.3), kind()
    train(optimizer, through, 6)
    train(before, stopped, 3)
    if way == "dict":
        after.load_state_dict(before.state_dict())
    else:
        before.save(tmp_path / f"state{way}")
        after.load(tmp_path / f"state{way}")
    assert same(before.state_dict(), after.state_dict())
    assert after.current_step == 4
    train(after, stopped, 3)
    assert same(optimizer.state_dict(), after.state_dict())
    assert all(np.array_equal(through[name], stopped[name]) for name in through)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_state_without_names(suffix: str, tmp_path: Path) -> None:
    optimizer, other = Adam(lr=0.5), Adam()
    optimizer.end_iteration()
    optimizer.save(str(tmp_path / f"state{suffix}"))
    other.load(str(tmp_path / f"state{suffix}"))
    assert (other.lr, other.current_step, other.state_dict()["state"]) == (0.5, 2, {})


def test_a_loaded_state_shares_no_memory() -> None:
    optimizer, other = trained(), Adam()
    other.load_state_dict(optimizer.state_dict())
    kept = other.state_dict()["state"]["__metadata__"]["exp_avg"].copy()
    train(optimizer, parameters(), 1)
    assert np.array_equal(other.state_dict()["state"]["__metadata__"]["exp_avg"], kept)


def test_moments_of_foreign_byte_order_are_taken() -> None:
    state, other = trained().state_dict(), Adam()
    name = "layers/0.weight"
    swapped = {key: array.astype(">f4") for key, array in state["state"][name].items()}
    other.load_state_dict({**state, "state": {name: swapped}})
    assert other.state_dict()["state"][name]["exp_avg"].dtype == np.dtype(np.float32)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_is_replaced_and_nothing_lies_beside_it(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"state{suffix}"
    Adam(lr=0.5).save(path)
    trained().save(path)
    loaded = Adam()
    loaded.load(path)
    assert same(loaded.state_dict(), trained().state_dict())
    assert list(tmp_path.iterdir()) == [path]


def test_a_new_file_can_be_read_by_whom_the_umask_lets(tmp_path: Path) -> None:
    old = os.umask(0o022)
    try:
        Adam().save(tmp_path / "state.npz")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "state.npz").stat().st_mode) == 0o644


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    link, target = tmp_path / "latest.npz", tmp_path / "runs" / "1.npz"
    link.symlink_to(target)
    trained().save(link)
    assert link.is_symlink()
    assert target.is_file()


class Crash(BaseException):
    """Not an Exception: as when a user interrupts."""


def crash(*_: Any, **__: Any) -> None:
    raise Crash


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("at", ["replace", "fsync", "writing"])
def test_a_crash_in_the_middle_leaves_the_old_file(
    at: str, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / f"state{suffix}"
    Adam(lr=0.5).save(path)
    before = path.read_bytes()
    if at == "writing":
        # The last array cannot be written: a header and all the others have been.
        real = np.ascontiguousarray if suffix == ".safetensors" else np.lib.format.write_array

        def write(*arguments: Any, **keywords: Any) -> Any:
            if any(isinstance(argument, np.ndarray) and argument.dtype == np.float16 for argument in arguments):
                raise Crash
            return real(*arguments, **keywords)

        where, name = (np, "ascontiguousarray") if suffix == ".safetensors" else (np.lib.format, "write_array")
        monkeypatch.setattr(where, name, write)
    else:
        monkeypatch.setattr(os, at, crash)
    optimizer = trained()
    with pytest.raises(Crash):
        optimizer.save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_killed_process_leaves_the_old_file(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"state{suffix}"
    trained().save(path)
    before = path.read_bytes()
    source = f"""
import os
import numpy as np
from rowstep.arrays import Adam
os.fsync = lambda descriptor: os._exit(9)
optimizer = Adam()
optimizer.step("w", np.zeros(100_000), np.ones(100_000))
optimizer.save({str(path)!r})
"""
    assert subprocess.run([sys.executable, "-c", source], check=False).returncode == 9
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 2
    Adam(lr=0.5).save(path)  # which also removes what the dead process was writing
    assert path.read_bytes() != before
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Adam().save(tmp_path / "none" / "state.npz")
    with pytest.raises(FileNotFoundError):
        Adam().load(tmp_path / "state.npz")


@pytest.mark.parametrize("name", ["state", "state.pt", "state.npz.bak", ".npz"])
def test_a_suffix_that_names_no_format(name: str, tmp_path: Path) -> None:
    for act in (Adam().save, Adam().load):
        with pytest.raises(ValueError, match=r"has the suffix '.*'; expected \.npz or \.safetensors"):
            act(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def refused(path: Path, message: str = "cannot be read as a state of rowstep.arrays|cannot be loaded") -> None:
    """Loading this file raises, names it, and changes nothing."""
    optimizer = trained()
    with pytest.raises(ValueError, match=message) as caught:
        optimizer.load(path)
    assert str(path) in str(caught.value)
    assert same(optimizer.state_dict(), trained().state_dict())


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_truncated_files_are_rejected(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"state{suffix}"
    trained().save(path)
    whole = path.read_bytes()
    lengths = {0, 1, 7, 8, 9, 100, len(whole) // 2, len(whole) - 1, *range(0, len(whole), 97)}
    for length in lengths:
        path.write_bytes(whole[:length])
        refused(path)
    path.write_bytes(whole + b"x" * 70_000)
    refused(path)


@given(position=st.integers(0, 10**9), value=st.integers(1, 255))
def test_a_damaged_npz_is_rejected_or_loads_the_same(
    position: int, value: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("damage") / "state.npz"
    expected = trained()
    expected.save(path)
    damaged = bytearray(path.read_bytes())
    damaged[position % len(damaged)] ^= value
    path.write_bytes(damaged)
    optimizer = Adam(lr=0.25)
    try:
        optimizer.load(path)
    except ValueError:
        assert (optimizer.lr, optimizer.state_dict()["state"]) == (0.25, {})
    else:
        assert same(optimizer.state_dict(), expected.state_dict())


@given(position=st.integers(0, 10**9), value=st.integers(1, 255))
def test_a_damaged_safetensors_header_is_rejected_or_still_means_something(
    position: int, value: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("damage") / "state.safetensors"
    trained().save(path)
    damaged = bytearray(path.read_bytes())
    damaged[position % (8 + int.from_bytes(damaged[:8], "little"))] ^= value
    path.write_bytes(damaged)
    optimizer = Adam(lr=0.25)
    try:
        optimizer.load(path)
    except ValueError:
        assert (optimizer.lr, optimizer.state_dict()["state"]) == (0.25, {})


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_foreign_files_are_rejected(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"state{suffix}"
    for content in (b"hello", b"\x80\x05" + pickle.dumps({"lr": 1}), b"PK\x05\x06" + bytes(18), b"\xff" * 100):
        path.write_bytes(content)
        refused(path)
    with path.open("wb") as file:
        np.save(file, np.ones(3))
    refused(path)


def save_arrays(path: Path, arrays: dict[str, Any], write: Any = np.savez) -> None:
    write(path, **arrays)


class Bomb:
    """What an attacker would put in a pickle."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("exploded",)


def test_pickles_are_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_arrays(tmp_path / "state.npz", {"w/exp_avg": np.array([Bomb()], dtype=object)})
    refused(tmp_path / "state.npz", "'w/exp_avg' has dtype object and shape .* expected floats or a single string")
    assert not (tmp_path / "exploded").exists()


def test_npz_files_of_others_are_rejected(tmp_path: Path) -> None:
    path, header = tmp_path / "state.npz", np.array(json.dumps({"version": 1}))
    np.savez(path, weights=np.ones(3))
    refused(path, "it has no entry 'rowstep.arrays'; expected one")
    save_arrays(path, {"rowstep.arrays": header}, np.savez_compressed)
    refused(path, "is compressed; expected an uncompressed entry")
    save_arrays(path, {"rowstep.arrays": header})
    refused(path, "cannot be loaded: the state has no 'betas', 'decoupled_weight_decay', 'eps', 'lr', 'step', 'weight_")
    save_arrays(path, {"rowstep.arrays": np.array(json.dumps({"version": 2}))})
    refused(path, "its header is .* expected version 1")
    save_arrays(path, {"rowstep.arrays": np.array("[" * 100_000)})
    refused(path)
    save_arrays(path, {"rowstep.arrays": header, "stray": np.ones(3)})
    refused(path, "it contains 'stray'; expected '<name>/exp_avg' or '<name>/exp_avg_sq'")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "hello")
    refused(path)


def write_safetensors(path: Path, header: Any, data: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{", "cannot be read"),
        (b"[" * 100_000, "cannot be read"),
        ([], "its header is a list; expected a JSON object"),
        ({"__metadata__": {"rowstep.arrays": 3}}, "its metadata is .* expected strings"),
        ({"__metadata__": []}, "its metadata is .* expected strings"),
        ({"a": ENTRY}, "it has no entry 'rowstep.arrays'; expected one"),
        (b'{"a": 1, "a": 2}', "its header has a duplicate key among"),
        ({"a": 3}, "'a' is 3; expected dtype, shape and data_offsets"),
        ({"a": {"dtype": "F32", "shape": [2]}}, "'a' is .* expected dtype, shape and data_offsets"),
        ({"a": ENTRY | {"dtype": "I64"}}, "'a' has dtype 'I64'; expected F16, F32, F64"),
        ({"a": ENTRY | {"dtype": []}}, r"'a' has dtype \[\]; expected F16, F32, F64"),
        ({"a": ENTRY | {"shape": [-2]}}, r"'a' has \[-2\]; expected a list of sizes"),
        ({"a": ENTRY | {"shape": [2.0]}}, r"'a' has \[2.0\]; expected a list of sizes"),
        ({"a": ENTRY | {"shape": [True, 2]}}, r"'a' has \[True, 2\]; expected a list of sizes"),
        (
            {"a": ENTRY | {"shape": [10**30]}},
            "'a' has data_offsets .* expected two, 4000000000000000000000000000000 bytes",
        ),
        ({"a": ENTRY | {"shape": [0, 10**30], "data_offsets": [0, 0]}, "b": ENTRY}, "cannot be read"),
        ({"a": ENTRY | {"shape": [1] * 100 + [2]}}, "cannot be read"),
        ({"a": ENTRY | {"data_offsets": [8, 0]}}, r"'a' has data_offsets \(8, 0\); expected two, 8 bytes apart"),
        ({"a": ENTRY | {"data_offsets": [0, 8, 8]}}, "'a' has data_offsets .* expected two, 8 bytes apart"),
        ({"a": ENTRY, "b": ENTRY}, "'b' begins at 0; expected 8, where the array before it ends"),
        ({"a": ENTRY | {"data_offsets": [8, 16]}}, "'a' begins at 8; expected 0"),
        ({}, "bytes; expected 10"),
    ],
)
def test_safetensors_headers_that_break_the_format(header: Any, message: str, tmp_path: Path) -> None:
    write_safetensors(tmp_path / "state.safetensors", header, bytes(8))
    refused(tmp_path / "state.safetensors", message)


def test_a_header_longer_than_its_file(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    path.write_bytes((2**63).to_bytes(8, "little") + b"{}")
    refused(path, "it has 10 bytes and claims a header of 9223372036854775808 bytes; expected")


def test_the_safetensors_package_reads_our_files_and_we_read_its(tmp_path: Path) -> None:
    theirs = pytest.importorskip("safetensors.numpy")
    path = tmp_path / "state.safetensors"
    optimizer = trained()
    optimizer.save(path)
    arrays = theirs.load_file(path)
    for name, moments in optimizer.state_dict()["state"].items():
        for key, array in moments.items():
            assert np.array_equal(arrays[f"{name}/{key}"], array)
    with path.open("rb") as file:
        metadata, _ = _safetensors.read(file)
    theirs.save_file(arrays, path, metadata)
    other = Adam()
    other.load(path)
    assert same(optimizer.state_dict(), other.state_dict())


MOMENT = np.zeros((2, 3), np.float32)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"step": 0}, ValueError, r"the state's step is 0; expected an integer in \[1, 2\^63\)"),
        ({"step": True}, ValueError, "the state's step is True; expected"),
        ({"step": 10**30}, ValueError, "the state's step is 1000"),
        ({"lr": float("nan")}, ValueError, "lr is nan; expected a finite number >= 0"),
        ({"betas": [0.9]}, TypeError, r"betas is \[0.9\]; expected two numbers"),
        ({"eps": "x"}, TypeError, "eps is 'x'; expected"),
        ({"weight_decay": -1.0}, ValueError, "weight_decay is -1.0; expected"),
        (
            {"decoupled_weight_decay": True},
            ValueError,
            "the state was saved by AdamW; expected one saved by Adam. Load it with AdamW",
        ),
        ({"decoupled_weight_decay": 0}, ValueError, "decoupled_weight_decay is 0; expected True or False"),
        ({"lr": "0.1"}, TypeError, "lr is '0.1'; expected a finite number"),
        ({"lr": True}, TypeError, "lr is True; expected a finite number"),
        ({"betas": "00"}, TypeError, "betas is '00'; expected two numbers"),
        ({"state": [1]}, ValueError, "the state's moments are a list; expected a dict keyed by name"),
        ({"state": {"w": 3}}, ValueError, "the state of 'w' has a int; expected"),
        ({"state": {"w": {1: 1, "b": 2}}}, ValueError, r"the state of 'w' has \['1', 'b'\]; expected"),
        (
            {"state": {"w": {"exp_avg": np.zeros(3), "exp_avg_sq": np.array([np.nan, -0.5, 1])}}},
            ValueError,
            "exp_avg_sq in the state of 'w' contains -0.5; expected no negative values",
        ),
        ({"state": {3: {}}}, TypeError, "the name 3 is a int; expected a str"),
        ({"state": {"w": {"exp_avg": MOMENT}}}, ValueError, r"the state of 'w' has \['exp_avg'\]; expected"),
        ({"state": {"w": {"exp_avg": MOMENT, "exp_avg_sq": MOMENT, "x": 1}}}, ValueError, "the state of 'w' has"),
        ({"state": {"w": {"exp_avg": MOMENT, "exp_avg_sq": MOMENT[0]}}}, ValueError, "'w' is float32 of shape"),
        ({"state": {"w": {"exp_avg": MOMENT, "exp_avg_sq": MOMENT.astype(float)}}}, ValueError, "float64 of shape"),
        ({"state": {"w": {"exp_avg": [1, 2], "exp_avg_sq": [1, 2]}}}, ValueError, "expected two float arrays"),
    ],
)
def test_states_that_do_not_fit_are_refused_as_a_whole(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    optimizer, other = trained(), trained().state_dict()
    with pytest.raises(error, match=message):
        optimizer.load_state_dict({**other, "lr": 0.7, **changes})
    assert same(optimizer.state_dict(), trained().state_dict())


def test_adam_and_adamw_do_not_load_each_other(tmp_path: Path) -> None:
    trained(AdamW).save(tmp_path / "state.npz")
    refused(tmp_path / "state.npz", "the state was saved by AdamW; expected one saved by Adam. Load it with AdamW")
    with pytest.raises(ValueError, match="the state was saved by Adam; expected one saved by AdamW"):
        AdamW().load_state_dict(Adam().state_dict())


def test_a_parameter_that_does_not_fit_its_loaded_moments(tmp_path: Path) -> None:
    trained().save(tmp_path / "state.npz")
    optimizer = Adam()
    optimizer.load(tmp_path / "state.npz")
    with pytest.raises(ValueError, match=r"'layers/0.weight': the parameter has shape \(4, 6\)"):
        optimizer.step("layers/0.weight", np.zeros((4, 6), np.float32), np.zeros((4, 6)))


def test_every_format_is_documented() -> None:
    assert all(suffix in str(_files.__doc__) and suffix in str(Adam.save.__doc__) for suffix in SUFFIXES)

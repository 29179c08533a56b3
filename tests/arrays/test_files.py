"""rowstep.arrays: states as dicts and as files. A run goes on after a load; a bad state or file changes nothing."""

from __future__ import annotations

import os
import pickle
import stat
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy

from rowstep.arrays import Adam, AdamW

pytestmark = pytest.mark.usefixtures("reference_backend")

SUFFIXES = (".npz", ".safetensors")


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


def contents(path: Path) -> tuple[str, dict[str, Any]]:
    """The header and the arrays of a file, as the packages of its format read them."""
    if path.suffix == ".npz":
        with np.load(path) as archive:
            arrays = dict(archive)
        return str(arrays.pop("rowstep.arrays")), arrays
    with safetensors.safe_open(path, "np") as file:
        return file.metadata()["rowstep.arrays"], safetensors.numpy.load_file(path)


def write(path: Path, header: str, arrays: dict[str, Any]) -> None:
    """A file of this format, of what may be no state."""
    if path.suffix == ".npz":
        with zipfile.ZipFile(path, "w") as archive:
            for key, array in {"rowstep.arrays": np.array(header), **arrays}.items():
                with archive.open(f"{key}.npy", "w") as member:
                    np.save(member, array)
    else:
        arrays = {key: array for key, array in arrays.items() if array.dtype.kind in "if"}
        safetensors.numpy.save_file(arrays, path, {"rowstep.arrays": header})


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


def test_a_loaded_state_shares_no_memory() -> None:
    optimizer, other = trained(), Adam()
    other.load_state_dict(optimizer.state_dict())
    kept = other.state_dict()["state"]["__metadata__"]["exp_avg"].copy()
    train(optimizer, parameters(), 1)
    assert np.array_equal(other.state_dict()["state"]["__metadata__"]["exp_avg"], kept)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_the_package_of_a_format_reads_our_files(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"state{suffix}"
    Adam(lr=0.5).save(path)
    assert contents(path)[1] == {}
    optimizer = trained()
    optimizer.save(str(path))
    header, arrays = contents(path)
    assert '"step": 4' in header
    assert len(arrays) == 2 * len(parameters())
    for name, moments in optimizer.state_dict()["state"].items():
        assert all(np.array_equal(arrays[f"{name}/{key}"], array) for key, array in moments.items())
    assert list(tmp_path.iterdir()) == [path]


def test_a_new_file_can_be_read_by_whom_the_umask_lets_and_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    link, target = tmp_path / "latest.npz", tmp_path / "runs" / "1.npz"
    link.symlink_to(target)
    old = os.umask(0o022)
    try:
        trained().save(link)
    finally:
        os.umask(old)
    assert link.is_symlink()
    assert stat.S_IMODE(target.stat().st_mode) == 0o644


def test_without_the_safetensors_package_an_error_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state.safetensors"
    trained().save(path)
    before = path.read_bytes()
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    for act in (Adam().save, Adam().load):
        with pytest.raises(
            ImportError, match=r"needs the package safetensors: .* Install rowstep\[safetensors\], or use"
        ):
            act(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


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
def test_foreign_files_are_rejected(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"state{suffix}"
    for content in (b"", b"hello", pickle.dumps({"lr": 1}), b"PK\x05\x06" + bytes(18), b"\xff" * 100):
        path.write_bytes(content)
        refused(path)
    with path.open("wb") as file:
        np.save(file, np.ones(3))
    refused(path)
    write(path, "[" * 100_000, {})
    refused(path)
    write(path, "{}", {"stray": np.ones(3)})
    refused(path, "cannot be loaded: the state has no betas, decoupled_weight_decay, eps, lr, step, weight_decay; ")


def test_files_without_our_header_are_rejected(tmp_path: Path) -> None:
    np.savez(tmp_path / "state.npz", weights=np.ones(3))
    safetensors.numpy.save_file({"weights": np.ones(3)}, tmp_path / "state.safetensors")
    for suffix in SUFFIXES:
        refused(tmp_path / f"state{suffix}", "it has no entry 'rowstep.arrays'; expected one")


class Bomb:
    """What an attacker would put in a pickle."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("exploded",)


def test_pickles_are_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez(tmp_path / "state.npz", **{"w/exp_avg": np.array([Bomb()], dtype=object)})
    refused(tmp_path / "state.npz", "Object arrays cannot be loaded")
    assert not (tmp_path / "exploded").exists()


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
        ({"decoupled_weight_decay": 0}, ValueError, "decoupled_weight_decay is 0; expected False"),
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
    message = (
        "decoupled_weight_decay is True; expected False, because this is Adam. Load a state with the class that saved"
    )
    refused(tmp_path / "state.npz", message)
    with pytest.raises(ValueError, match="decoupled_weight_decay is False; expected True, because this is AdamW"):
        AdamW().load_state_dict(Adam().state_dict())


def test_a_parameter_that_does_not_fit_its_loaded_moments(tmp_path: Path) -> None:
    trained().save(tmp_path / "state.npz")
    optimizer = Adam()
    optimizer.load(tmp_path / "state.npz")
    with pytest.raises(ValueError, match=r"'layers/0.weight': the parameter has shape \(4, 6\)"):
        optimizer.step("layers/0.weight", np.zeros((4, 6), np.float32), np.zeros((4, 6)))

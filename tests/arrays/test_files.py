"""rowstep.arrays: states as dicts and as files. A run goes on after a load; a bad state or file changes nothing."""

from __future__ import annotations

import os
import pickle
import stat
import sys
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


def same(one: Adam, other: Adam) -> bool:
    """Whether two optimizers hold the same, to the bit."""
    held = [optimizer.state_dict() for optimizer in (one, other)]
    for state in held:
        state["state"] = {name: [(m.dtype, m.tolist()) for m in pair.values()] for name, pair in state["state"].items()}
    return held[0] == held[1]


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
        np.savez(path, **{"rowstep.arrays": np.array(header), **arrays})
    else:
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
    assert same(before, after)
    assert after.current_step == 4
    train(after, stopped, 3)
    assert same(optimizer, after)
    assert all(np.array_equal(through[name], stopped[name]) for name in through)


def test_a_loaded_state_shares_no_memory_and_has_this_machines_byte_order() -> None:
    optimizer, other, state = trained(), Adam(), trained().state_dict()
    for moments in state["state"].values():
        moments["exp_avg"], moments["exp_avg_sq"] = (m.astype(m.dtype.newbyteorder(">")) for m in moments.values())
    other.load_state_dict(state)
    assert same(optimizer, other)
    other.load_state_dict(optimizer.state_dict())
    train(optimizer, parameters(), 1)
    assert same(other, trained())


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


def test_formats_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state.safetensors"
    trained().save(path)
    before = path.read_bytes()
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    for act in (Adam().save, Adam().load):
        for name in ("state", "state.pt", ".npz"):
            with pytest.raises(ValueError, match=r"has the suffix '.*'; expected \.npz or \.safetensors"):
                act(tmp_path / name)
        with pytest.raises(ImportError, match=r"\.safetensors needs a package: .* Install rowstep\[safetensors\]"):
            act(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def refused(path: Path, message: str = "cannot be read as a state of rowstep.arrays: ") -> None:
    """Loading this file raises, names it, and changes nothing."""
    optimizer = trained()
    with pytest.raises(ValueError, match=message) as caught:
        optimizer.load(path)
    assert str(path) in str(caught.value)
    assert same(optimizer, trained())


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_foreign_files_are_rejected(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"state{suffix}"
    for content in (b"", b"hello", pickle.dumps({"lr": 1}), b"PK\x05\x06" + bytes(18), b"\xff" * 100, b"\x93NUMPY\1"):
        path.write_bytes(content)
        refused(path)
    write(path, "[" * 100_000, {})
    refused(path)
    write(path, "{}", {"stray": np.ones(3)})
    refused(path, "rowstep.arrays: the state has no betas, decoupled_weight_decay, eps, lr, step, weight_decay; ")


def test_pickles_and_files_without_our_header_are_rejected(tmp_path: Path) -> None:
    npz, other = tmp_path / "state.npz", tmp_path / "state.safetensors"
    safetensors.numpy.save_file({"weights": np.ones(3)}, other)
    refused(other, "it has no entry 'rowstep.arrays'; expected one")
    np.savez(npz, weights=np.ones(3))
    refused(npz, "it has no entry 'rowstep.arrays'; expected one")
    np.savez(npz, weights=np.array([print], dtype=object))
    refused(npz, "Object arrays cannot be loaded")


MOMENT = np.zeros((2, 3), np.float32)
NEGATIVE = {"exp_avg": np.zeros(3), "exp_avg_sq": np.array([np.nan, -0.5, 1])}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"step": 0}, ValueError, r"the state's step is 0; expected an integer in \[1, 2\^63\)"),
        ({"step": True}, ValueError, "the state's step is True; expected"),
        ({"lr": float("nan")}, ValueError, "lr is nan; expected a finite number >= 0"),
        ({"betas": [0.9]}, TypeError, r"'betas': \[0.9\], .*; expected numbers, and two for betas"),
        ({"state": {"w": {"exp_avg": MOMENT}}}, ValueError, r"the state of 'w' has \['exp_avg'\]; expected"),
        ({"state": {"w": NEGATIVE}}, ValueError, "exp_avg_sq in the state of 'w' contains -0.5; expected no negative"),
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
    assert same(optimizer, trained())


def test_a_file_of_another_class_or_for_another_parameter(tmp_path: Path) -> None:
    trained(AdamW).save(tmp_path / "state.npz")
    refused(tmp_path / "state.npz", "the state is AdamW's; expected Adam's. Load a state with the class that saved it")
    optimizer = AdamW()
    optimizer.load(tmp_path / "state.npz")
    with pytest.raises(ValueError, match=r"'layers/0.weight': the parameter is float32 of shape \(4, 6\)"):
        optimizer.step("layers/0.weight", np.zeros((4, 6), np.float32), np.zeros((4, 6)))

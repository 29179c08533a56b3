"""Compiled kernels on disk: used when they can be, and never the reason why a step fails."""

from __future__ import annotations

import hashlib
import os
import pickle
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import rowstep
from rowstep._kernels import cache


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, in a process that has not warned yet."""
    monkeypatch.setattr(cache, "directories", lambda: [tmp_path / "kernels"])
    monkeypatch.setattr(cache, "_has_warned", False)
    return tmp_path / "kernels"


def new_process() -> Any:
    """A small kernel that nothing is known about but what is on disk."""

    def plus_one(x: Any) -> Any:
        return x + 1

    return cache.kernel(plus_one)


def was_on_disk(kernel: Any) -> bool:
    """Whether the kernel was loaded and not compiled, by its first call; the result is checked."""
    assert kernel(1) == 2
    hits, misses = (sum(counter.values()) for counter in kernel.stats[1:])
    assert hits + misses == 1
    return bool(hits)


def files(directory: Path) -> list[Path]:
    return sorted(directory.iterdir()) if directory.exists() else []


def test_a_kernel_is_compiled_once(directory: Path) -> None:
    assert not was_on_disk(new_process())
    assert was_on_disk(new_process())
    assert len(files(directory)) == 1


def cut_to(size: int) -> Callable[[bytes], bytes]:
    return lambda content: content[:size]


def flipped(position: float) -> Callable[[bytes], bytes]:
    def flip(content: bytes) -> bytes:
        damaged = bytearray(content)
        damaged[int(position * (len(content) - 1))] ^= 1
        return bytes(damaged)

    return flip


def with_checksum(content: bytes) -> bytes:
    return hashlib.sha256(content).digest() + content


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": cut_to(0),
    "cut in the checksum": cut_to(20),
    "cut": cut_to(1000),
    "one byte short": cut_to(-1),
    "longer": lambda content: content + b"\0",
    "zeros": lambda content: bytes(len(content)),
    "a bit of the checksum": flipped(0),
    "a bit of the code": flipped(0.5),
    "the last bit": flipped(1),
    "not a pickle": lambda content: with_checksum(b"garbage"),
    "another thing": lambda content: with_checksum(pickle.dumps(42)),
    "a class that is not there": lambda content: with_checksum(b"cnumba.no_such_module\nThing\n."),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_replaced(damage: str, directory: Path) -> None:
    was_on_disk(new_process())
    (path,) = files(directory)
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    assert not was_on_disk(new_process())
    assert was_on_disk(new_process())
    assert files(directory) == [path]


def test_a_directory_in_the_place_of_a_file(directory: Path) -> None:
    was_on_disk(new_process())
    (path,) = files(directory)
    path.unlink()
    path.mkdir()
    with pytest.warns(RuntimeWarning, match="NUMBA_CACHE_DIR"):
        assert not was_on_disk(new_process())
    assert files(directory) == [path]


def test_where_nothing_can_be_saved_one_warning_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    below_a_file = tmp_path / "file" / "kernels"
    monkeypatch.setattr(cache, "directories", lambda: [below_a_file])
    with pytest.warns(RuntimeWarning) as caught:
        assert not was_on_disk(new_process())
    assert not was_on_disk(new_process())  # a second warning would be an error
    (warning,) = caught
    assert str(below_a_file) in str(warning.message)
    assert "Set NUMBA_CACHE_DIR" in str(warning.message)


def test_a_full_disk(directory: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.warns(RuntimeWarning, match="File too large"):
            assert not was_on_disk(new_process())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert files(directory) == []


def test_kernels_that_cannot_be_written_are_read(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image made with its kernels, run by a user who may not write to it."""
    was_on_disk(new_process())
    before = files(directory)

    def refuse(*arguments: Any) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(cache, "_write", refuse)
    monkeypatch.setattr(cache, "directories", lambda: [tmp_path / "home", directory])
    assert was_on_disk(new_process())
    assert files(directory) == before
    assert not (tmp_path / "home").exists()


def test_the_second_directory_serves_when_the_first_cannot(directory: Path, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(cache, "directories", lambda: [tmp_path / "file" / "kernels", directory])
    assert not was_on_disk(new_process())
    assert was_on_disk(new_process())


def test_a_directory_that_is_removed_while_the_process_runs(directory: Path) -> None:
    kernel = new_process()
    assert kernel(1) == 2
    shutil.rmtree(directory)
    assert kernel(1.5) == 2.5
    assert len(files(directory)) == 1


def test_an_interrupted_save_leaves_nothing_behind(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: Any) -> None:
        raise KeyboardInterrupt

    kernel = new_process()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", interrupt)  # all is written, under another name
        with pytest.raises(KeyboardInterrupt):
            kernel(1)
    assert files(directory) == []
    assert kernel(1) == 2
    assert not was_on_disk(new_process())


def test_each_processor_and_each_type_has_a_file_of_its_own() -> None:
    kernel_cache = cache.KernelCache(files)

    def name(types: Any, *target: str) -> str:
        return kernel_cache._file_name(types, SimpleNamespace(magic_tuple=lambda: target))

    names = {
        name("int64", "x86_64", "znver3", "+f16c"),
        name("int64", "x86_64", "znver3", ""),
        name("int64", "x86_64", "generic", "+f16c"),
        name("int32", "x86_64", "znver3", "+f16c"),
    }
    assert len(names) == 4


def test_a_change_in_any_source_is_noticed_and_what_is_old_removed(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    was_on_disk(new_process())
    old = files(directory)
    source = tmp_path / "called_by_a_kernel.py"
    source.write_text("changed")
    monkeypatch.setattr(cache, "SOURCES", (*cache.SOURCES, source))
    cache._versions.cache_clear()
    try:
        assert not was_on_disk(new_process())
    finally:
        cache._versions.cache_clear()
    assert len(files(directory)) == 1
    assert files(directory) != old


def test_an_update_under_a_running_process_is_not_mistaken_for_what_it_runs(tmp_path: Path) -> None:
    package = tmp_path / "rowstep"
    shutil.copytree(Path(rowstep.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    program = """
import pathlib, sys
from rowstep._kernels import cache
if sys.argv[1:]:
    with pathlib.Path(sys.argv[1]).open("a") as source:
        source.write("# changed")
print(cache.__file__, cache._versions())
"""
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}

    def name(*changed: Path) -> str:
        command = [sys.executable, "-c", program, *map(str, changed)]
        where, name = subprocess.check_output(command, text=True, env=environment).split()
        assert Path(where).is_relative_to(package)
        return name

    before = name()
    assert name(package / "_kernels" / "walk.py") == before
    assert name() != before


def test_the_sources_are_all_that_kernels_are_made_of() -> None:
    package = Path(rowstep.__file__).parent
    inside = set((package / "_kernels").glob("*.py"))
    outside = {
        package / f"{name}.py"
        for source in inside
        for name in re.findall(r"^from \.\.(\w+) import", source.read_text(), re.MULTILINE)
        if name != "_rules"
    } | {package / "_rules" / "adam.py", package / "_rules" / "rounding.py"}
    called_from_python_only = {package / "_fork.py"}
    assert set(cache.SOURCES) == inside | outside - called_from_python_only


TWO_STEPS = """
import sys, warnings
import torch, rowstep
assert rowstep.__file__.startswith(sys.argv[1])
param = torch.nn.Parameter(torch.zeros(3, 2))
param.grad = torch.sparse_coo_tensor([[7]], torch.ones(1, 2), (3, 2), check_invariants=False)
optimizer = rowstep.SparseAdam([param])
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        try:
            optimizer.step()
        except IndexError as error:  # a kernel has found it, the smallest that there is
            print(error)
print(*(warning.message for warning in caught), sep="\\n")
"""


def test_a_step_where_neither_the_package_nor_the_home_can_be_written(tmp_path: Path) -> None:
    shutil.copytree(Path(rowstep.__file__).parent, tmp_path / "rowstep", ignore=shutil.ignore_patterns("__pycache__"))
    # Files where directories should be: nothing can be written there, not even by root.
    (tmp_path / "rowstep" / "_kernels" / "__pycache__").touch()
    (tmp_path / "home").touch()
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("NUMBA_", "XDG_"))}
    done = subprocess.run(
        [sys.executable, "-c", TWO_STEPS, str(tmp_path)],
        capture_output=True, text=True, check=False,
        env=environment | {"PYTHONPATH": str(tmp_path), "HOME": str(tmp_path / "home")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, second, warning = done.stdout.splitlines()
    assert first == second
    assert "index 7" in first
    assert "every process recompiles them" in warning
    assert "__pycache__" in warning
    assert str(tmp_path / "home") in warning
    assert "Set NUMBA_CACHE_DIR" in warning

"""Compiled kernels on disk: used when they can be, and never the reason why a step fails."""

from __future__ import annotations

import hashlib
import os
import pickle
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from numba import config, types

import rowstep
from rowstep._kernels import cache

DIRECTORIES = cache.directories


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

    return cache.kernel(types.int64)(plus_one)


def was_on_disk(kernel: Any) -> bool:
    """Whether the kernel was loaded and not compiled, by its first call; the result is checked."""
    assert kernel.call(1) == 2
    dispatcher = kernel._dispatcher
    hits, misses = (sum(counter.values()) for counter in (dispatcher._cache_hits, dispatcher._cache_misses))
    assert hits + misses == 1
    return bool(hits)


def files(directory: Path) -> list[Path]:
    return sorted(directory.iterdir()) if directory.exists() else []


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
    "one byte short": cut_to(-1),
    "longer": lambda content: content + b"\0",
    "a bit of the checksum": flipped(0),
    "the last bit": flipped(1),
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
    monkeypatch.setattr(cache, "directories", lambda: [below_a_file, tmp_path / "home"])
    assert not was_on_disk(new_process())
    assert was_on_disk(new_process())


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


def test_a_directory_that_is_removed_while_the_process_runs(directory: Path) -> None:
    assert not was_on_disk(new_process())
    shutil.rmtree(directory)
    assert not was_on_disk(new_process())
    assert len(files(directory)) == 1


def test_an_interrupted_save_leaves_nothing_behind(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: Any) -> None:
        raise KeyboardInterrupt

    kernel = new_process()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", interrupt)  # all is written, under another name
        with pytest.raises(KeyboardInterrupt):
            kernel.call(1)
    assert files(directory) == []
    assert kernel.call(1) == 2
    assert not was_on_disk(new_process())


def test_each_processor_and_each_type_has_a_file_of_its_own() -> None:
    kernel_cache = cache.KernelCache(files)

    def name(types: Any, *target: str) -> str:
        return kernel_cache._file_name(types, SimpleNamespace(magic_tuple=lambda: target))

    cases = [("int64", "znver3", "+f16c"), ("int64", "znver3", ""), ("int64", "generic", ""), ("int32", "znver3", "")]
    assert len({name(*case) for case in cases}) == 4


def test_kernels_are_kept_in_the_package_or_where_numba_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "CACHE_DIR", "")
    assert DIRECTORIES()[0] == Path(cache.__file__).parent / "__pycache__"
    monkeypatch.setattr(config, "CACHE_DIR", "/elsewhere")
    assert [path.parent for path in DIRECTORIES()] == [Path("/elsewhere")]


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
with pathlib.Path(sys.argv[1]).open("a") as source:
    source.write("# changed")
running = cache._versions()
cache._versions.cache_clear()
print(cache.__file__, running != cache._versions())
"""
    command = [sys.executable, "-c", program, str(package / "_kernels" / "rows.py")]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    where, differs = subprocess.check_output(command, text=True, env=environment).split()
    assert Path(where).is_relative_to(package)
    assert differs == "True"


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


def test_an_interrupt_waits_until_a_kernel_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """LLVM takes a module over in a call after which Python must not be interrupted."""

    def plus_one(number: int) -> int:
        return number + 1

    load = cache.KernelCache.load_overload

    def interrupted(self: Any, *args: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return load(self, *args)

    monkeypatch.setattr(cache.KernelCache, "load_overload", interrupted)
    kernel, handler = cache.kernel(types.int64)(plus_one), signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        kernel.call(1)
    assert kernel._dispatcher.overloads  # it was compiled to its end
    assert signal.getsignal(signal.SIGINT) is handler
    assert kernel.call(1) == 2

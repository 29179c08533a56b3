"""rowstep.arrays: saving while processes are killed and disks are full, and places that are no files.

Afterwards there is the old file or the new one, whole, and nothing piles up beside it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rowstep.arrays import Adam, _replace
from tests.arrays.test_files import SUFFIXES, same
from tests.helpers.deferred_cases import LONG

KILLS = 500 if LONG else 40


@pytest.fixture(autouse=True)
def _reference_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROWSTEP_BACKEND", "reference")


def optimizer_of(size: int, step: int) -> Adam:
    """One whose moments all say which step they are of."""
    optimizer = Adam()
    moments = {"exp_avg": np.full(size, float(step)), "exp_avg_sq": np.full(size, float(step))}
    optimizer.load_state_dict({**Adam().state_dict(), "step": step, "state": {"w": moments, "x": moments}})
    return optimizer


def python(source: str, *arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, "-c", source, *map(str, arguments)], check=False, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# A process of its own forks, because a child of the tests' process would inherit their threads. The child is killed at
# a line of Python, of the save's or of what it calls; or, in a long run, by the clock, which also hits system calls.
SAVE_AND_DIE = """
import os, random, signal, sys, time
from pathlib import Path
import numpy as np
from rowstep.arrays import Adam

path, kills, by_clock = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "clock"
random = random.Random(0)

def optimizer_of(step):
    optimizer = Adam()
    moments = {key: np.full(20_000, float(step)) for key in ("exp_avg", "exp_avg_sq")}
    optimizer.load_state_dict({**Adam().state_dict(), "step": step, "state": {"w": moments, "x": moments}})
    return optimizer

def save_to_line(optimizer, last):
    lines = 0
    def count(frame, event, argument):
        nonlocal lines
        lines += 1
        if lines == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return count
    sys.settrace(count)
    optimizer.save(path)
    sys.settrace(None)
    return lines

states = [optimizer_of(1), optimizer_of(2)]
states[1].save(path)
lines = save_to_line(states[0], -1)
now, seen, left, cut = 1, [], 0, 0
for kill in range(kills):
    following = states[2 - now]
    child = os.fork()
    if child == 0:
        if by_clock:
            while True:
                following.save(path)
        # Every other time it dies near the end: before the rename, after it, or after the save. The end is some lines
        # later where there is a dead writer's file to remove.
        save_to_line(following, lines + 300 - random.randrange(330 if kill % 2 else lines + 300))
        os.kill(os.getpid(), signal.SIGKILL)
    if by_clock:
        time.sleep(random.uniform(0, 0.02))
        os.kill(child, signal.SIGKILL)
    random.random()
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    loaded = Adam()
    loaded.load(path)
    assert all((array == loaded.current_step).all() for pair in loaded.state_dict()["state"].values()
               for array in pair.values())
    now = loaded.current_step
    seen.append(now)
    beside = len(list(path.parent.iterdir())) - 1
    cut += beside > 0
    left = max(left, beside)
states[0].save(path)
print(sorted(set(seen)), left, cut > 0, len(list(path.parent.iterdir())))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("way", ["line", *(["clock"] if LONG else [])])
def test_killed_at_any_point_of_a_save(way: str, suffix: str, tmp_path: Path) -> None:
    printed = python(SAVE_AND_DIE, tmp_path / f"state{suffix}", KILLS, way)
    # Both states were found, at most one file was left beside them, kills did hit writes, and the last save cleared up.
    assert printed.strip() == "[1, 2] 1 True 1"


def test_writers_at_the_same_time_do_not_remove_each_others_files(tmp_path: Path) -> None:
    path = tmp_path / "state.npz"
    with _replace.replacing(path) as file:
        file.write(b"not whole yet")
        for step in (1, 2):
            optimizer_of(10, step).save(path)
        assert len(list(tmp_path.iterdir())) == 2
        optimizer_of(10, 3).save(tmp_path / "other.npz")
    assert path.read_bytes() == b"not whole yet"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["other.npz", "state.npz"]


def test_a_file_removed_before_it_could_be_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = _replace._lock
    removed: list[Path] = []

    def remove_first(descriptor: int) -> None:
        if not removed:
            removed.extend(tmp_path.iterdir())
            removed[0].unlink()
        lock(descriptor)

    monkeypatch.setattr(_replace, "_lock", remove_first)
    optimizer_of(10, 1).save(tmp_path / "state.npz")
    assert len(removed) == 1
    assert [file.name for file in tmp_path.iterdir()] == ["state.npz"]


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What may be another writer's stays."""
    beside = tmp_path / f"{_replace._prefix(tmp_path / 'state.npz')}00.tmp"
    beside.touch()

    def no_locks(descriptor: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(_replace, "_lock", no_locks)
    optimizer_of(10, 1).save(tmp_path / "state.npz")
    assert sorted(tmp_path.iterdir()) == [beside, tmp_path / "state.npz"]


@contextlib.contextmanager
def full_disk(folder: Path) -> Iterator[None]:
    """A file system of 1 MB."""
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "rowstep-test", folder], check=False, capture_output=True
    )
    if made.returncode:
        pytest.skip("only root can mount a file system")
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


def assert_not_saved(path: Path, code: int) -> None:
    """A save of 1.6 MB fails, says what to do, and leaves the state of step 1 alone."""
    with pytest.raises(OSError, match=r"nothing was saved, and any existing file is unchanged\. Free disk") as caught:
        optimizer_of(50_000, 2).save(path)
    assert caught.value.errno == code
    assert caught.value.filename == str(path)
    loaded = Adam()
    loaded.load(path)
    assert same(loaded.state_dict(), optimizer_of(1000, 1).state_dict())
    assert list(path.parent.iterdir()) == [path]
    optimizer_of(1000, 3).save(path)  # one that fits


@pytest.mark.skipif(sys.platform != "linux", reason="mounts a tmpfs")
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_full_disk(suffix: str, tmp_path: Path) -> None:
    with full_disk(tmp_path):
        optimizer_of(1000, 1).save(tmp_path / f"state{suffix}")
        assert_not_saved(tmp_path / f"state{suffix}", errno.ENOSPC)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_limit_on_the_size_of_files(suffix: str, tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    path = tmp_path / f"state{suffix}"
    optimizer_of(1000, 1).save(path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        assert_not_saved(path, errno.EFBIG)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nothing was saved.*none/state\.npz"):
        Adam().save(tmp_path / "none" / "state.npz")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_names_as_long_as_a_file_system_takes(suffix: str, tmp_path: Path) -> None:
    for name in ("n" * (255 - len(suffix)), "ü" * ((255 - len(suffix)) // 2)):
        optimizer_of(3, 7).save(tmp_path / f"{name}{suffix}")
        loaded = Adam()
        loaded.load(tmp_path / f"{name}{suffix}")
        assert loaded.current_step == 7
    assert len(list(tmp_path.iterdir())) == 2
    for act in (Adam().save, Adam().load):
        with pytest.raises(OSError, match="name too long"):
            act(tmp_path / f"{'n' * 256}{suffix}")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_places_that_are_no_files_are_refused_at_once(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = {kind: tmp_path / f"{kind}{suffix}" for kind in ("pipe", "directory", "socket", "device")}
    os.mkfifo(places["pipe"])
    places["directory"].mkdir()
    places["device"].symlink_to("/dev/zero")
    monkeypatch.chdir(tmp_path)  # the address of a socket is of limited length
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(places["socket"].name)
    before = sorted(tmp_path.iterdir())
    for kind, place in places.items():
        for act in (Adam().save, Adam().load):
            with pytest.raises(ValueError, match=f"is a {kind}; expected a regular file"):
                act(place)
    assert sorted(tmp_path.iterdir()) == before

"""rowstep.arrays: saves that are killed, interrupted or out of space. The old file stays, or the new one is whole."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rowstep.arrays import Adam
from tests.arrays.test_files import SUFFIXES, same, trained
from tests.helpers.interrupts import interrupted

pytestmark = pytest.mark.usefixtures("reference_backend")


def loaded(path: Path) -> Adam:
    optimizer = Adam()
    optimizer.load(path)
    return optimizer


# An interrupt between open() and `with` leaves it to garbage collection to close the file.
@pytest.mark.filterwarnings("ignore:Exception ignored in. <_io.FileIO:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_an_interrupt_at_any_line_leaves_the_old_file_or_the_new_one(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"state{suffix}"

    def prepare() -> tuple[None, Callable[[], None]]:
        Adam(lr=0.5).save(path)
        return None, lambda: trained().save(path)

    found = [same(loaded(path), Adam(lr=0.5)) or same(loaded(path), trained()) for _ in interrupted(prepare)]
    assert found and all(found)  # noqa: PT018  one idea


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("at", ["fsync", "replace"])
def test_a_killed_process_leaves_the_old_file(at: str, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"state{suffix}"
    trained().save(path)
    before = path.read_bytes()
    source = f"import os; from rowstep.arrays import Adam; os.{at} = lambda *_: os._exit(9); Adam().save({str(path)!r})"
    assert subprocess.run([sys.executable, "-c", source], check=False).returncode == 9
    assert path.read_bytes() == before
    Adam(lr=0.5).save(path)
    assert same(loaded(path), Adam(lr=0.5))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_disk_that_takes_no_more(suffix: str, tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    path = tmp_path / f"state{suffix}"
    Adam(lr=0.5).save(path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 10, limits[1]))
    try:
        with pytest.raises(OSError, match="nothing was saved, and any existing file is unchanged") as caught:
            trained().save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(path))
    assert same(loaded(path), Adam(lr=0.5))
    assert list(tmp_path.iterdir()) == [path]


def test_places_that_take_no_file(tmp_path: Path) -> None:
    (tmp_path / "folder.npz").mkdir()
    with pytest.raises(IsADirectoryError, match=r"nothing was saved.*folder\.npz"):
        Adam().save(tmp_path / "folder.npz")
    with pytest.raises(FileNotFoundError, match=r"nothing was saved.*none/state\.npz"):
        Adam().save(tmp_path / "none" / "state.npz")
    assert os.listdir(tmp_path) == ["folder.npz"]
    for suffix in SUFFIXES:
        with pytest.raises(FileNotFoundError):
            loaded(tmp_path / f"state{suffix}")

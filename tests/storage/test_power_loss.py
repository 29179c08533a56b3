"""What a disk has at the moment the power fails: a copy of the image that a file system is mounted from.

The image has what the file system wrote to it, and not what waits in memory.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from rowstep import storage
from rowstep.storage import _record


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[Path], Path]]:
    """Mounts an image with ext4."""
    folders: list[Path] = []

    def mount(image: Path) -> Path:
        folder = tmp_path / f"mounted-{len(folders)}"
        folder.mkdir()
        if subprocess.run(["mount", "-o", "loop", image, folder], capture_output=True).returncode:
            pytest.skip("cannot mount an image")
        folders.append(folder)
        return folder

    yield mount
    for folder in folders:
        subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_disk_has_what_was_synced(
    tmp_path: Path, mounted: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.geteuid() or shutil.which("mkfs.ext4") is None:
        pytest.skip("needs root and mkfs.ext4")
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(64 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True)
    disk = mounted(image)

    table = storage.create(disk / "a.safetensors", 20_000, 64)
    for step in (1, 2, 3):
        table.fill_(step)
        storage.sync(table)
        if step == 2:
            storage.snapshot(disk / "snapshot", table)
    table[:100] = 4
    shutil.copyfile(image, tmp_path / "not synced")
    table[:] = 5
    os.sync()  # as the system does of itself, after some time
    shutil.copyfile(image, tmp_path / "written by the system")
    storage.sync(table)
    del table
    shutil.copyfile(image, tmp_path / "ended in order")

    monkeypatch.setattr(_record, "identity", lambda file: "the next boot")
    for name, step, is_clean in [
        ("not synced", 3, False),
        ("written by the system", 5, False),
        ("ended in order", 5, True),
    ]:
        disk = mounted(tmp_path / name)
        assert load_file(disk / "a.safetensors")["weight"].eq(step).all(), name
        assert storage.status(disk / "a.safetensors").clean is is_clean, name
        assert load_file(disk / "snapshot" / "a.safetensors")["weight"].eq(2).all()
        assert storage.status(disk / "snapshot" / "a.safetensors").clean

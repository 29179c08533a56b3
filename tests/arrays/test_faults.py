"""rowstep.arrays: saving while processes are killed and disks are full. The old file stays, or the new one is whole."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from rowstep.arrays import Adam
from tests.arrays.test_files import SUFFIXES, same, trained
from tests.helpers.deferred_cases import LONG
from tests.kernels.test_backends import python

pytestmark = pytest.mark.usefixtures("reference_backend")

KILLS = 500 if LONG else 40

# A process of its own forks, because a child of the tests' process would inherit their threads. The child is killed at
# a line of Python, of the save's or of what it calls; every other time near the end, where the file is renamed.
SAVE_AND_DIE = """
import os, random, signal, sys
import numpy as np
from rowstep.arrays import Adam

random, seen = random.Random(0), set()

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
    optimizer.save(PATH)
    sys.settrace(None)
    return lines

states = [optimizer_of(1), optimizer_of(2)]
states[0].save(PATH)
lines, now = save_to_line(states[0], -1), 1
for kill in range(KILLS):
    last = lines + 10 - random.randrange(60 if kill % 2 else lines + 10)
    child = os.fork()
    if child == 0:
        save_to_line(states[2 - now], last)
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    loaded = Adam()
    loaded.load(PATH)
    now = loaded.current_step
    assert all((array == now).all() for pair in loaded.state_dict()["state"].values() for array in pair.values())
    seen.add(now)
left = [file for file in os.listdir(os.path.dirname(PATH)) if file.endswith(".tmp")]
print(sorted(seen), len(left) > 0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_killed_at_any_line_of_a_save(suffix: str, tmp_path: Path) -> None:
    """Both states are found, each whole, and kills did hit writes."""
    printed = python(f"PATH, KILLS = {str(tmp_path / f'state{suffix}')!r}, {KILLS}\n{SAVE_AND_DIE}")
    assert printed == "[1, 2] True"


@pytest.mark.parametrize("at", ["fsync", "replace"])
def test_an_interrupt_leaves_the_old_file_and_nothing_beside_it(
    at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state.npz"
    Adam(lr=0.5).save(path)
    before = path.read_bytes()

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, at, interrupt)
    with pytest.raises(KeyboardInterrupt):
        trained().save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


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
    loaded = Adam()
    loaded.load(path)
    assert same(loaded.state_dict(), Adam(lr=0.5).state_dict())
    assert list(tmp_path.iterdir()) == [path]


def test_places_that_take_no_file(tmp_path: Path) -> None:
    (tmp_path / "folder.npz").mkdir()
    with pytest.raises(IsADirectoryError, match=r"nothing was saved.*folder\.npz"):
        Adam().save(tmp_path / "folder.npz")
    with pytest.raises(FileNotFoundError, match=r"nothing was saved.*none/state\.npz"):
        Adam().save(tmp_path / "none" / "state.npz")
    assert [file.name for file in tmp_path.iterdir()] == ["folder.npz"]
    for suffix in SUFFIXES:
        with pytest.raises(FileNotFoundError):
            Adam().load(tmp_path / f"state{suffix}")

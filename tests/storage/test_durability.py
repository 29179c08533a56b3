"""What is synced, what is told about it, and who may write."""

from __future__ import annotations

import errno
import gc
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from rowstep import storage
from rowstep.storage import _record, _snapshot
from tests.storage.others import Others


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.safetensors"


def make(path: Path, rows: int = 1_000, dim: int = 16) -> torch.Tensor:
    return storage.create(path, rows, dim, init=nn.init.normal_)


def change_record(path: Path, **fields: Any) -> None:
    record = Path(f"{path}.rowstep.json")
    record.write_text(json.dumps({**json.loads(record.read_text()), **fields}))


# Clean or not


def test_a_file_is_clean_until_it_is_written_and_once_it_is_synced(path: Path) -> None:
    table = make(path)
    assert storage.status(path).clean
    for row in (0, 999, 500):
        table[row] += 1
        assert not storage.status(path).clean
        synced_at = storage.sync(table)
        assert storage.status(path) == (True, synced_at, "it is as its last sync left it")


def test_a_write_right_after_a_sync_is_noticed(path: Path) -> None:
    table = make(path)
    for number in range(50):
        table[number] = 1
        storage.sync(table)
        table[number] = 2
        assert not storage.status(path).clean


def test_every_way_of_writing_is_noticed(path: Path) -> None:
    table = make(path)
    table.numpy()[3] = 1
    assert not storage.status(path).clean
    storage.sync(table)
    save_file({"weight": table.clone()}, path.with_name("b"))
    os.replace(path.with_name("b"), path)
    assert not storage.status(path).clean


def test_opening_tells_whether_the_last_sync_was_clean(path: Path) -> None:
    table = make(path)
    table[0] = 1
    del table
    for writable in (False, True):
        with pytest.warns(UserWarning, match="is not clean: it was written after its last sync, so the last step may"):
            table = storage.open(path, "weight", writable=writable)
    storage.sync(table)
    del table
    assert torch.equal(storage.open(path, "weight", writable=True), load_file(path)["weight"])


def test_files_synced_by_one_call_have_the_same_time(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "abc"]
    tables = [make(path) for path in paths]
    synced_at = storage.sync(nn.Parameter(tables[0])[3:5], tables[1])
    assert [storage.status(path).synced_at == synced_at for path in paths] == [True, True, False]
    synced_at = storage.sync()
    assert {storage.status(path).synced_at for path in paths} == {synced_at}


def test_what_others_made_has_no_record_until_it_is_opened_for_writing(path: Path) -> None:
    save_file({"weight": torch.ones(4, 4)}, path)
    storage.open(path, "weight")
    assert storage.status(path).clean is None
    table = storage.open(path, "weight", writable=True)
    assert storage.status(path).clean
    table[0] = 2
    assert not storage.status(path).clean


def test_after_another_boot_only_an_orderly_end_is_clean(path: Path) -> None:
    table = make(path)
    change_record(path, open_in="another boot/1/2")
    assert storage.status(path).reason.startswith("it was open for writing when the machine stopped")
    storage.sync(table)
    assert storage.status(path).clean
    del table
    assert json.loads(Path(f"{path}.rowstep.json").read_text())["open_in"] is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_record, "identity", lambda file: "the next boot/1/2")
        assert storage.status(path).clean
        storage.open(path, "weight", writable=True)
    # It was opened, and then the power failed.
    change_record(path, open_in="the next boot/1/2")
    with pytest.warns(UserWarning, match="the machine stopped"):
        table = storage.open(path, "weight", writable=True)
    assert not storage.status(path).clean
    storage.sync(table)
    assert storage.status(path).clean


def test_an_orderly_end_of_the_process_is_noted(path: Path, others: Others) -> None:
    others.run("t = storage.create(sys.argv[1], 5, 5); t[0] = 1; storage.sync()", path)
    assert json.loads(Path(f"{path}.rowstep.json").read_text())["open_in"] is None
    others.run("t = storage.open(sys.argv[1], 'weight', writable=True); t[0] = 2; t[1] = 1", path)
    assert json.loads(Path(f"{path}.rowstep.json").read_text())["open_in"] is not None
    assert not storage.status(path).clean


def test_a_forked_process_leaves_the_record_to_its_parent(path: Path, others: Others) -> None:
    others.run(
        """
table = storage.create(sys.argv[1], 5, 5)
if os.fork() == 0:
    sys.exit()
os.wait()
assert '"open_in": null' not in open(f"{sys.argv[1]}.rowstep.json").read()
        """,
        path,
    )
    assert '"open_in": null' in Path(f"{path}.rowstep.json").read_text()


def test_a_file_system_that_notices_nothing_has_no_clean_files() -> None:
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        pytest.skip("no tmpfs to write to")
    path = memory / f"rowstep-test-{os.getpid()}"
    try:
        table = make(path)
        storage.sync(table)
        assert storage.status(path).reason.startswith("its file system does not tell")
    finally:
        path.unlink()
        Path(f"{path}.rowstep.json").unlink()


def test_a_record_that_cannot_be_read_is_named(path: Path) -> None:
    make(path)
    for text in ("", "{}", "[1]", "[" * 100_000, '{"synced_at": 1, "odd": 2}'):
        Path(f"{path}.rowstep.json").write_text(text)
        with pytest.raises(storage.FileFormatError, match=r"a.safetensors.rowstep.json is damaged; delete it if"):
            storage.open(path, "weight")


def test_a_creation_that_did_not_finish_is_not_opened(path: Path, others: Others) -> None:
    assert others.run("storage.create(sys.argv[1], 10, 10, init=lambda chunk: os.kill(os.getpid(), 9))", path) == "9"
    assert path.stat().st_size > 400
    with pytest.raises(
        storage.FileFormatError, match=r"its creation has not finished\. Delete it, and create it again"
    ):
        storage.open(path, "weight")


def test_a_sync_that_failed_is_not_forgotten(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = make(path)
    table[0] = 1

    def fail(file: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="Input/output error"):
            storage.sync(table)
    with pytest.raises(OSError, match="an earlier sync failed, and what it did not write may be lost"):
        storage.sync(table)
    assert not storage.status(path).clean


def test_a_sync_that_was_interrupted_can_be_repeated(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = make(path)
    table[0] = 1
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            storage.sync(table)
    assert not storage.status(path).clean
    storage.sync(table)
    assert storage.status(path).clean


def test_a_folder_that_is_gone_does_not_keep_others_from_being_synced(tmp_path: Path) -> None:
    paths = [tmp_path / name / "a" for name in ("first", "second", "third")]
    tables = []
    for path in paths:
        path.parent.mkdir()
        tables.append(storage.create(path, 3, 2))
        tables[-1][0] = 1
    shutil.rmtree(paths[1].parent)
    with pytest.raises(FileNotFoundError, match=re.escape(str(paths[1]))):
        storage.sync()
    assert storage.status(paths[0]).clean
    assert storage.status(paths[2]).clean


def test_only_tensors_in_files_are_synced() -> None:
    with pytest.raises(ValueError, match=r"a tensor of shape \(3, 2\) is not in a file that this process writes"):
        storage.sync(torch.ones(3, 2))


# Writers and readers

TRY_TO_WRITE = """
try:
    storage.open(sys.argv[1], "weight", writable=True)
    print("opened")
except BlockingIOError as error:
    print(error)
"""


def test_a_second_writer_is_refused_while_the_first_has_a_tensor(path: Path, others: Others) -> None:
    table = make(path)
    parameter = nn.Parameter(table)
    del table
    assert "another process has it open for writing, and only one may" in others.run(TRY_TO_WRITE, path)
    assert "7.0" in others.run("storage.open(sys.argv[1], 'weight'); print(7.0)", path)
    del parameter
    gc.collect()
    assert "opened" in others.run(TRY_TO_WRITE, path)


def test_one_process_may_open_a_file_twice(path: Path, others: Others) -> None:
    first = make(path)
    second = storage.open(path, "weight", writable=True)
    second[3] = 5
    assert torch.equal(first, second)
    del first
    assert "only one may" in others.run(TRY_TO_WRITE, path)


def test_a_link_is_the_file_that_it_leads_to(path: Path, others: Others) -> None:
    table = make(path)
    link = path.with_name("link")
    link.symlink_to(path)
    assert "only one may" in others.run(TRY_TO_WRITE, link)
    storage.open(link, "weight", writable=True)[0] = 3
    assert table[0].eq(3).all()
    assert not storage.status(link).clean


# Snapshots


def test_a_snapshot_has_what_was_there(tmp_path: Path, path: Path) -> None:
    tables = [make(path), storage.create(tmp_path / "state", 10**7, (), torch.float64, key="exp_avg_sq")]
    tables[1][5_000_000] = 7
    expected = tables[0].clone()
    storage.snapshot(tmp_path / "snap")
    tables[0].zero_()
    tables[1].zero_()
    copy = tmp_path / "snap" / "state"
    assert copy.stat().st_blocks * 512 < 100_000
    assert storage.open(copy, "exp_avg_sq", writable=True)[5_000_000] == 7
    assert torch.equal(load_file(tmp_path / "snap" / path.name)["weight"], expected)
    assert storage.status(tmp_path / "snap" / path.name).clean
    assert sorted(each.name for each in tmp_path.iterdir() if each.is_dir()) == ["snap"]


def test_a_snapshot_needs_a_new_folder(tmp_path: Path, path: Path) -> None:
    table = make(path)
    (tmp_path / "snap.rowstep-partial").mkdir()
    storage.snapshot(tmp_path / "snap", table)
    with pytest.raises(FileExistsError, match="choose another path"):
        storage.snapshot(tmp_path / "snap", table)


def test_a_snapshot_of_nothing_is_refused(tmp_path: Path) -> None:
    gc.collect()
    with pytest.raises(ValueError, match="this process has no file open for writing; expected"):
        storage.snapshot(tmp_path / "snap")
    assert not list(tmp_path.iterdir())


def test_files_of_the_same_name_do_not_go_into_one_folder(tmp_path: Path, path: Path) -> None:
    (tmp_path / "more").mkdir()
    tables = [make(path), make(tmp_path / "more" / path.name)]
    with pytest.raises(ValueError, match=r"called a\.safetensors, a\.safetensors; expected different names"):
        storage.snapshot(tmp_path / "snap", *tables)


def test_writing_while_a_snapshot_is_copied_is_noticed(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, copy = make(path), _snapshot._written_parts

    def write_meanwhile(file: int) -> Iterator[tuple[int, int]]:
        table[3] = 1
        yield from copy(file)

    monkeypatch.setattr(_snapshot, "_written_parts", write_meanwhile)
    monkeypatch.setattr(_snapshot, "_FICLONE", 0)  # as where blocks cannot be shared
    with pytest.raises(OSError, match="was written while it was copied; expected no step meanwhile"):
        storage.snapshot(tmp_path / "snap", table)
    assert [each for each in tmp_path.iterdir() if each.is_dir()] == []


# Full disks


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    if (
        os.geteuid()
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True).returncode
    ):
        pytest.skip("only root can mount a small disk")
    yield disk
    gc.collect()
    subprocess.run(["umount", "--lazy", disk], check=True)


def test_a_full_disk_is_an_error_where_we_write(tmp_path: Path, small_disk: Path) -> None:
    attempts: list[dict[str, Any]] = [{"reserve": True}, {"init": nn.init.ones_}]
    for options in attempts:
        with pytest.raises(
            OSError, match="No space left on device; free disk space, or choose another disk: "
        ) as raised:
            storage.create(small_disk / "a", 1_000, 1_000, **options)
        assert raised.value.errno == errno.ENOSPC
        assert list(small_disk.iterdir()) == []
    table = make(tmp_path / "a", 1_000, 1_000)
    with pytest.raises(OSError, match="No space left on device"):
        storage.snapshot(small_disk / "snap", table)
    assert list(small_disk.iterdir()) == []
    sparse = storage.create(small_disk / "a", 10**6, 100)
    sparse[7] = 1
    storage.snapshot(small_disk / "snap", sparse)


def test_syncs_wait_for_the_clock_of_files_only_if_they_must(path: Path) -> None:
    table = make(path)
    table[0] = 1
    time.sleep(2 * _record._TICK_SECONDS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "sleep", lambda seconds: pytest.fail("waited"))
        storage.sync(table)

"""Tables in files train like tables in memory, and are files that others read and write."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from rowstep import SparseAdam, storage
from tests.storage.others import Others

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32]


def count_up(chunk: torch.Tensor) -> None:
    chunk.copy_(torch.arange(chunk.numel()).view(chunk.shape) % 100)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [3, (), (2, 5)], ids=str)
def test_the_package_reads_what_create_wrote(tmp_path: Path, dtype: torch.dtype, dim: int | tuple[int, ...]) -> None:
    table = storage.create(tmp_path / "a.safetensors", 7, dim, dtype, count_up, key="users")
    read = load_file(tmp_path / "a.safetensors")["users"]
    assert (read.dtype, read.shape) == (dtype, (7, dim) if isinstance(dim, int) else (7, *dim))
    assert torch.equal(read, table)
    assert read.view(-1)[5] == 5
    with safetensors.safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_written_to_a_mapped_file_is_read_by_the_package(tmp_path: Path, dtype: torch.dtype) -> None:
    theirs = {"users": torch.arange(12).view(4, 3).to(dtype), "items": torch.arange(10).view(2, 5).to(dtype)}
    save_file(theirs, tmp_path / "a.safetensors")
    users, items = (storage.open(tmp_path / "a.safetensors", key, writable=True) for key in ("users", "items"))
    assert torch.equal(users, theirs["users"])
    users[2], items[1, 4] = 50, 60
    read = load_file(tmp_path / "a.safetensors")
    assert torch.equal(read["users"], users)
    assert torch.equal(read["items"], items)
    assert torch.stack([read["users"][2, 0], read["items"][1, 4], read["items"][0, 1]]).tolist() == [50, 60, 1]


def test_training_in_a_file_has_the_bits_of_training_in_memory(tmp_path: Path, backend: str) -> None:
    path = tmp_path / "a.safetensors"
    weight = storage.create(path, 50, 8, init=nn.init.normal_)
    tables = [nn.Embedding(50, 8, sparse=True, _weight=each) for each in (weight.clone(), weight)]
    optimizers = [SparseAdam(table.parameters()) for table in tables]
    for _ in range(5):
        ids = torch.randint(0, 50, (20,))
        for table, optimizer in zip(tables, optimizers, strict=True):
            optimizer.zero_grad()
            table(ids).square().sum().backward()
            optimizer.step()
    storage.sync(tables[1].weight)
    assert torch.equal(load_file(path)["weight"], tables[0].weight)


def test_zeros_take_no_space_until_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    table = storage.create(path, 1_000_000, 64)
    assert path.stat().st_blocks * 512 < 100_000 < path.stat().st_size
    table[500_000] = 1
    storage.sync()
    assert path.stat().st_blocks * 512 < 100_000
    assert table[[0, 500_000, 999_999]].sum(1).tolist() == [0, 64, 0]


def test_reserved_space_is_taken_at_once(tmp_path: Path) -> None:
    storage.create(tmp_path / "a.safetensors", 1_000, 1_000, reserve=True)
    assert (tmp_path / "a.safetensors").stat().st_blocks * 512 >= 4_000_000


def test_init_sees_every_row_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_CHUNK_BYTES", 1_000)
    seen = []

    def number(chunk: torch.Tensor) -> torch.Tensor:
        assert not chunk.any()
        seen.append(len(chunk))
        return chunk.fill_(len(seen))

    table = storage.create(tmp_path / "a.safetensors", 70, 10, init=number)
    assert seen == [25, 25, 20]
    assert table[:, 0].tolist() == [1] * 25 + [2] * 25 + [3] * 20


def test_a_bar_shows_how_far_a_long_init_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes the capture for a terminal
    for chunks, is_long in [(range(3), False), (range(40), True)]:
        assert list(storage._with_bar(chunks, "a.safetensors")) == list(chunks)
        printed = capsys.readouterr()
        assert ("Filling a.safetensors" in printed.err) is is_long
        assert not printed.out


def test_an_init_that_fails_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="init returned another object; expected it to fill the tensor"):
        storage.create(tmp_path / "a.safetensors", 7, 3, init=torch.randn_like)
    with pytest.raises(ZeroDivisionError):
        storage.create(tmp_path / "a.safetensors", 7, 3, init=lambda chunk: 1 / 0)
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_opened_for_reading_leaves_the_file_alone(tmp_path: Path) -> None:
    table = storage.create(tmp_path / "a.safetensors", 4, 2, init=nn.init.ones_)
    read = storage.open(tmp_path / "a.safetensors", "weight")
    read[0] = 9
    assert table.eq(1).all()
    assert storage.status(tmp_path / "a.safetensors").clean


AS_NOBODY = """
if os.geteuid() == 0:  # may do everything
    os.seteuid(65534)
print(storage.open(sys.argv[1], "weight").sum().item())
for attempt in ("open(sys.argv[1], 'weight', writable=True)", "create(sys.argv[1] + '2', 1, 1)"):
    try:
        eval(f"storage.{attempt}")
    except PermissionError as error:
        print(error)
"""


def test_a_file_that_may_only_be_read_is_opened_for_reading(others: Others) -> None:
    with tempfile.TemporaryDirectory() as folder:  # tmp_path has parents that only their owner may pass
        path = Path(folder) / "a.safetensors"
        save_file({"weight": torch.ones(3, 2)}, path)
        path.chmod(0o444)
        path.parent.chmod(0o555)
        printed = others.run(AS_NOBODY, path)
        path.parent.chmod(0o755)
    advice = (
        "[Errno 13] Permission denied; get permission for the file and its folder, or open it without writable=True"
    )
    assert printed == f"6.0\n{advice}: '{path}'\n{advice}: '{path}2'\n"


# Checkpoints of several files


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    save_file({"users": torch.ones(3, 2)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"items": torch.ones(4, 2)}, tmp_path / "model-00002-of-00002.safetensors")
    names = {"users": "model-00001-of-00002.safetensors", "items": "model-00002-of-00002.safetensors"}
    names |= {"up": "../x", "empty": "", "odd": "a\0b", "half": "\ud800"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return tmp_path


@pytest.mark.parametrize("name", ["", "model.safetensors.index.json"])
def test_a_tensor_is_found_among_shards(shards: Path, name: str) -> None:
    storage.open(shards / name, "items", writable=True)[2] = 5
    assert load_file(shards / "model-00002-of-00002.safetensors")["items"].sum() == 16
    assert storage.open(shards / name, "users").shape == (3, 2)


def test_shards_that_are_not_there_are_named(shards: Path) -> None:
    for key, found in [
        ("tags", r"names no file for the tensor 'tags'; it has \['users', 'items'"),
        ("up", r"'\.\./x' for 'up'; expected the name of a file beside it"),
        ("empty", "'' for 'empty'; expected the name of a file beside it"),
        ("odd", "for 'odd'; expected the name of a file beside it"),
        ("half", "for 'half'; expected the name of a file beside it"),
    ]:
        with pytest.raises(storage.FileFormatError, match=found):
            storage.open(shards, key)
    (shards / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError):
        storage.open(shards, "items")
    (shards / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(storage.FileFormatError, match="it is not an object"):
        storage.open(shards, "items")


def test_a_folder_without_an_index_has_one_file(tmp_path: Path) -> None:
    with pytest.raises(storage.FileFormatError, match=r"has no such file; expected one \*\.safetensors\.index"):
        storage.open(tmp_path, "users")
    save_file({"users": torch.ones(3, 2)}, tmp_path / "a.safetensors")
    assert storage.open(tmp_path, "users").sum() == 6
    save_file({"users": torch.ones(3, 2)}, tmp_path / "b.safetensors")
    with pytest.raises(storage.FileFormatError, match=r"has a\.safetensors, b\.safetensors; expected one"):
        storage.open(tmp_path, "users")


# Size

HUGE = """
def resident(): return int(next(line for line in open("/proc/self/status") if line.startswith("VmRSS")).split()[1])
before = resident()
path, rows = sys.argv[1], (100 << 30) // 128
ids = torch.randint(0, rows, (1000,))
table = storage.create(path, rows, 64, torch.bfloat16)
table[ids] = 1
storage.sync()
del table
table = storage.open(path, "weight", writable=True)
assert table[ids].float().mean() == 1
table[ids] += 1
storage.sync()
assert storage.open(path, "weight")[ids].eq(2).all()
print(resident() - before)
"""


def test_100_gigabytes_take_little_memory(tmp_path: Path, others: Others) -> None:
    path = tmp_path / "a.safetensors"
    assert int(others.run(HUGE, path)) < 100_000  # KB
    assert path.stat().st_size > 100 << 30
    assert path.stat().st_blocks * 512 < 20 << 20


def test_import_needs_no_numba() -> None:
    code = "import sys; sys.modules['numba'] = None; from rowstep import storage; print(storage.__all__)"
    assert "create" in subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

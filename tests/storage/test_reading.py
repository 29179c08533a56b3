"""Rows of tables in files are read from disk before they are needed, many at the same time."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rowstep import HostEmbedding, SparseAdam, prefetched, storage
from rowstep.storage import _mapping


def pages_from_disk(read: Callable[[], object]) -> int:
    """How many pages this thread waits for."""
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_majflt
    read()
    return resource.getrusage(resource.RUSAGE_THREAD).ru_majflt - before


def on_disk(path: Path, rows: int, dim: int, dtype: torch.dtype) -> Tensor:
    storage.create(path, rows, dim, dtype, init=torch.nn.init.normal_)
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return storage.open(path, "weight", writable=True)


@pytest.mark.parametrize("dim", [64, 700, 3000])
def test_no_read_waits_for_the_disk_afterwards(tmp_path: Path, dim: int) -> None:
    weight = on_disk(tmp_path / "a.safetensors", 4000, dim, torch.float32)
    rows = torch.arange(0, 4000, 9, dtype=torch.int32)
    if not pages_from_disk(lambda: weight[-1].clone()):  # the first ones come with the header
        pytest.skip("this file system does not let go of pages")
    _mapping.read_rows(weight, rows)
    assert pages_from_disk(lambda: weight[rows].clone()) == 0


def test_what_is_in_memory_is_only_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = storage.create(tmp_path / "a.safetensors", 4000, 64, init=torch.nn.init.normal_)
    weight.sum()
    monkeypatch.setattr(_mapping, "ThreadPoolExecutor", None)
    _mapping.read_rows(weight, torch.arange(4000))


@pytest.mark.parametrize("ahead", [False, True])
def test_a_lookup_reads_rows_and_their_state(tmp_path: Path, ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[Any, list[int]]] = []
    monkeypatch.setattr(_mapping, "read_rows", lambda tensor, rows: read.append((tuple(tensor.shape), rows.tolist())))
    monkeypatch.setenv("ROWSTEP_BACKEND", "numba")
    table = HostEmbedding(50, 4, device="cpu", path=tmp_path / "a.safetensors")
    optimizer = SparseAdam(table.parameters(), state_dir=tmp_path, second_moment="row")
    batches = [torch.tensor([5, 3, 5]), torch.tensor([9])]
    for ids in prefetched(batches, {table: lambda ids: ids}) if ahead else batches:
        table(ids).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert read[0] == ((50, 4), [3, 5])
    assert ((50, 4), [9]) in read
    if not ahead:  # what is announced before the first step has no state yet
        assert ((50,), [9]) in read


def test_rows_are_read_one_by_one_where_no_thread_can_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = on_disk(tmp_path / "a.safetensors", 4000, 700, torch.float32)

    def refuse(*_: object) -> None:
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    monkeypatch.setattr(ThreadPoolExecutor, "submit", refuse)
    table = HostEmbedding.from_pretrained(weight, device="cpu")
    rows = torch.arange(0, 4000, 9)
    assert torch.equal(table(rows), weight[rows])


@pytest.mark.parametrize("in_file", ["table", "state"])
def test_a_gradient_of_no_rows_can_be_added_to(tmp_path: Path, in_file: str) -> None:
    """torch resizes its indices, which are the row numbers that were read: memory that it must own."""
    path = tmp_path / "a.safetensors" if in_file == "table" else None
    table = HostEmbedding(50, 4, device="cpu", path=path)
    optimizer = SparseAdam(table.parameters(), state_dir=tmp_path if in_file == "state" else None)
    for _ in range(2):
        optimizer.zero_grad()
        for count in (0, 3, 0):
            table(torch.arange(count)).sum().backward()
        assert table.weight.grad is not None
        assert table.weight.grad.coalesce().indices().tolist() == [[0, 1, 2]]
        optimizer.step()

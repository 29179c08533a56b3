"""Where a host table lives: in RAM or in a file, and there it stays when the model moves."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rowstep import DeferredAdam, HostEmbedding, SparseAdam, storage
from tests.helpers.copies import objects_through_a_file, pickled

IDS = torch.tensor([[3, 5], [5, 9]])


def test_a_new_table_is_initialised_as_torchs(tmp_path: Path) -> None:
    path = tmp_path / "table.safetensors"
    torchs, in_ram, in_file = (
        make(40, 8, padding_idx=3).weight.detach()
        for make in (seeded(nn.Embedding), seeded(HostEmbedding), seeded(partial(HostEmbedding, path=path)))
    )
    assert torch.equal(in_ram, torchs)
    assert torch.equal(in_file, torchs)
    assert torch.equal(load_file(path)["weight"], torchs)
    assert storage.status(path).clean is not False


def seeded(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(*args: Any, **options: Any) -> Any:
        torch.manual_seed(1)
        return make(*args, **options)

    return made


def test_a_table_in_a_file_is_trained_in_place(tmp_path: Path, backend: str) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"items": torch.ones(10, 4, dtype=torch.bfloat16), "head": torch.ones(4)}, path)
    table = HostEmbedding(10, 4, dtype=torch.bfloat16, path=path, key="items")
    optimizer = SparseAdam(table.parameters(), lr=0.5)
    table(IDS).sum().backward()
    optimizer.step()
    assert load_file(path)["items"][[3, 4, 5]].tolist() == [[0.5] * 4, [1.0] * 4, [0.5] * 4]
    where = table.weight.data_ptr()
    table.load_state_dict({"weight": torch.full((10, 4), 2.0)})
    assert table.weight.data_ptr() == where
    assert load_file(path)["items"].eq(2).all()
    assert table.state_dict()["weight"].data_ptr() == where


def test_a_file_with_another_table_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.safetensors"
    HostEmbedding(10, 4, path=path)
    for shape, dtype in [((10, 5), torch.float32), ((11, 4), torch.float32), ((10, 4), torch.bfloat16)]:
        with pytest.raises(
            ValueError, match=r"has shape \(10, 4\) and dtype torch.float32; expected .* Pass those of the file"
        ):
            HostEmbedding(*shape, dtype=dtype, path=path)
    with pytest.raises(storage.FileFormatError):
        HostEmbedding(10, 4, path=path, key="items")


def test_bad_options_leave_no_file(tmp_path: Path) -> None:
    for options, message in [
        ({"mode": "median"}, "mode is 'median'; expected 'sum'"),
        ({"include_last_offset": True}, "include_last_offset is True and mode is None"),
        ({"padding_idx": 10}, "padding_idx is 10; expected a row of the table, which has 10"),
        ({"padding_idx": -11}, "padding_idx is -11"),
    ]:
        with pytest.raises(ValueError, match=message):
            HostEmbedding(10, 4, path=tmp_path / "table.safetensors", **options)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_bad_lookups() -> None:
    table = HostEmbedding(10, 4)
    for ids in ([3, 10], [-1, 3]):
        with pytest.raises(IndexError, match=r"id (10|-1) is outside the table; expected 0 <= id < 10"):
            table(torch.tensor(ids))
    with pytest.raises(ValueError, match="expected neither, or a table with a mode"):
        table(IDS.view(-1), torch.tensor([0]))
    with pytest.raises(ValueError, match="max mode does not support scaling"):
        HostEmbedding(10, 4, mode="max", scale_grad_by_freq=True)(IDS)
    with pytest.raises(RuntimeError, match="indices"):
        table(torch.tensor([1.0]))


def test_rows_that_were_added_can_be_looked_up() -> None:
    table = HostEmbedding(10, 4)
    optimizer = SparseAdam(table.parameters())
    optimizer.grow(table.weight, 2, torch.ones(2, 4))
    assert table(torch.tensor([11])).tolist() == [[1.0] * 4]
    optimizer.keep_rows(table.weight, torch.arange(5))
    with pytest.raises(IndexError, match="id 5 is outside the table; expected 0 <= id < 5"):
        table(torch.tensor([5]))


def test_a_tensor_becomes_a_table_without_a_copy() -> None:
    rows = torch.randn(10, 4, dtype=torch.float64)
    table = HostEmbedding.from_pretrained(rows, freeze=False, mode="sum")
    assert table.weight.data_ptr() == rows.data_ptr()
    assert torch.equal(table(IDS), rows[IDS].sum(1))
    assert not HostEmbedding.from_pretrained(rows).weight.requires_grad
    with pytest.raises(ValueError, match="expected two dimensions"):
        HostEmbedding.from_pretrained(rows[0])
    with pytest.raises(TypeError, match="from_pretrained has no dtype, key or path"):
        HostEmbedding.from_pretrained(rows, dtype=torch.float16)


@pytest.mark.parametrize("part", [lambda rows: rows[:, :3], lambda rows: rows[::2], Tensor.t])
def test_a_table_may_be_a_part_of_one_in_a_file(tmp_path: Path, part: Callable[[Tensor], Tensor]) -> None:
    rows = part(storage.create(tmp_path / "a.safetensors", 10, 10, init=nn.init.normal_))
    table = HostEmbedding.from_pretrained(rows, freeze=False)
    assert torch.equal(table(IDS[0, :1]), rows[3:4])


# Moves and conversions


@pytest.mark.parametrize("in_file", [False, True])
def test_moving_a_model_sets_where_rows_arrive(tmp_path: Path, in_file: bool) -> None:
    table = HostEmbedding(10, 4, device="cpu", path=tmp_path / "a.safetensors" if in_file else None)
    model, where = nn.Sequential(table, nn.Linear(4, 1)), table.weight.data_ptr()
    model.to("meta")
    assert (table.device.type, table.weight.data_ptr(), table.weight.device.type) == ("meta", where, "cpu")
    model.to_empty(device="cpu")
    assert (table.device.type, table.weight.data_ptr()) == ("cpu", where)
    model.float().cpu()
    assert table.weight.data_ptr() == where


def test_a_table_in_ram_is_converted() -> None:
    table = HostEmbedding(10, 4)
    weight, before = table.weight, table.weight.detach().clone()
    nn.Sequential(table).to("meta", torch.bfloat16)
    assert table.weight is weight
    assert torch.equal(weight, before.to(torch.bfloat16))
    assert (table.device.type, weight.device.type) == ("meta", "cpu")


def test_a_table_in_ram_is_shared_with_processes() -> None:
    table = HostEmbedding(10, 4)
    nn.Sequential(table).share_memory()
    assert table.weight.is_shared()  # type: ignore[no-untyped-call]


def test_a_table_in_a_file_is_not_converted(tmp_path: Path) -> None:
    table = HostEmbedding(10, 4, path=tmp_path / "a.safetensors")
    for convert in (table.half, table.double, table.share_memory):
        with pytest.raises(TypeError, match=r"would become .*; expected it to stay torch.float32 there"):
            convert()
    assert copy.deepcopy(table).half().weight.dtype is torch.float16  # a copy is in memory


def test_device_defaults_to_torchs(tmp_path: Path) -> None:
    assert HostEmbedding(3, 2).device.type == "cpu"
    with torch.device("meta"):
        table, in_file = HostEmbedding(3, 2), HostEmbedding(3, 2, path=tmp_path / "a.safetensors")
    assert (table.device.type, table.weight.device.type) == ("meta", "cpu")
    assert (in_file.device.type, in_file.weight.device.type) == ("meta", "cpu")
    assert repr(table) == "HostEmbedding(3, 2, sparse=True, mode=None, device='meta')"


# Copies


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled, objects_through_a_file])
@pytest.mark.parametrize("in_file", [False, True])
def test_copies_are_tables_of_their_own(tmp_path: Path, copied: Callable[[Any], Any], in_file: bool) -> None:
    table = HostEmbedding(10, 4, mode="mean", padding_idx=3, path=tmp_path / "a.safetensors" if in_file else None)
    other = copied(table)
    assert torch.equal(other(IDS), table(IDS))
    with torch.no_grad():
        other.weight.zero_()
    assert table.weight.any()


def test_rows_that_wait_are_up_to_date_in_lookups_copies_and_state_dicts(backend: str) -> None:
    table, dense = HostEmbedding(10, 4, dtype=torch.float64), nn.Embedding(10, 4, dtype=torch.float64)
    dense.load_state_dict(table.state_dict())
    ours, torchs = DeferredAdam(table.parameters()), torch.optim.Adam(dense.parameters())
    for ids in (torch.tensor([1, 2, 3]), torch.tensor([3]), torch.tensor([4, 3]), torch.tensor([2])):
        for module, optimizer in ((table, ours), (dense, torchs)):
            optimizer.zero_grad()
            (module(ids) ** 2).sum().backward()
            optimizer.step()
    everything = torch.arange(10)
    torch.testing.assert_close(table(everything[1:2]), dense(everything[1:2]), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(copy.deepcopy(table).weight, dense.weight, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(table.state_dict(), dense.state_dict(), rtol=1e-12, atol=1e-12)


def test_a_renormalised_row_that_waited(backend: str) -> None:
    tables = HostEmbedding(10, 4, max_norm=1.0), nn.Embedding(10, 4, max_norm=1.0, sparse=True)
    tables[1].load_state_dict(tables[0].state_dict())
    for table in tables:
        optimizer = DeferredAdam(table.parameters(), lr=0.1)
        for ids in (torch.tensor([1, 2, 3]), torch.tensor([3]), torch.tensor([1, 3])):
            optimizer.zero_grad()
            table(ids).sum().backward()
            optimizer.step()
    assert torch.equal(tables[0].weight, tables[1].weight)

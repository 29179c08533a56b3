"""What torch.save writes of sharded tables: the rows of one rank, which no other rank takes for its own."""

from __future__ import annotations

import io
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rowstep import SparseAdam
from rowstep.distributed import ShardedEmbedding, ShardedEmbeddingCollection
from tests.helpers.ranks import Ranks

ROWS, WIDTH = 24, 3  # blocks of 2, 3 and 4 ranks fill each other up

Contents = list[Tensor]


def tables(seed: int, placement: str = "divided") -> Any:
    torch.manual_seed(seed)
    table = ShardedEmbedding(ROWS, WIDTH, placement=placement)
    return table, SparseAdam(table.parameters(), lr=0.1)


def contents(table: ShardedEmbedding, optimizer: SparseAdam) -> Contents:
    """All rows and moments, by id, on every rank."""
    moments: Any = optimizer.state_dict()["state"][0]["exp_avg"]
    by_position = moments if table.is_everywhere else moments.full_tensor().view(ROWS, WIDTH)
    return [table.full_weight(), by_position[table.positions(torch.arange(ROWS))]]


def write(rank: int, path: Path) -> Contents:
    table, optimizer = tables(seed=1)
    table(torch.arange(ROWS)).sin().sum().backward()
    optimizer.step()
    torch.save((table.state_dict(), optimizer.state_dict()), path / f"{rank}.pt")
    return contents(table, optimizer)


def read(rank: int, path: Path, writer: int | None = None, placement: str = "divided") -> Contents:
    """Of each rank its own file, or all that of one."""
    table, optimizer = tables(seed=2, placement=placement)
    for target, loaded in zip(
        (table, optimizer), torch.load(path / f"{rank if writer is None else writer}.pt"), strict=True
    ):
        target.load_state_dict(loaded)
    return contents(table, optimizer)


def refusals(rank: int, path: Path, writer: int, placement: str) -> list[str]:
    """What ranks say that load the file of one of them: for the table, and for the optimizer."""
    table, optimizer = tables(seed=2, placement=placement)
    before, said = table.weight.detach().clone(), []
    for target, loaded in zip((table, optimizer), torch.load(path / f"{writer}.pt"), strict=True):
        try:
            target.load_state_dict(loaded)
            said.append("")
        except (ValueError, RuntimeError) as error:
            said.append(str(error))
    assert not said[0] or torch.equal(table.weight, before)
    if dist.is_initialized():
        dist.barrier()
    return said


def test_each_rank_can_read_its_own_file(ranks: Ranks, tmp_path: Path) -> None:
    expected = ranks.run(2, write, tmp_path)[0]
    for found in ranks.run(2, read, tmp_path):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("placement", ["divided", "everywhere"])
def test_the_file_of_one_rank_is_refused_on_all_others(ranks: Ranks, tmp_path: Path, placement: str) -> None:
    ranks.run(2, write, tmp_path)
    for writer in range(2):
        for rank, said in enumerate(ranks.run(2, refusals, tmp_path, writer, placement)):
            if placement == "divided" and rank == writer:
                assert said == ["", ""]
            else:  # where rows have to travel, no rank waits for those that have raised
                assert all(
                    f"holds the rows of rank {writer}, and this is rank {1 - writer}; exp" in each for each in said
                )


@pytest.mark.parametrize("count", [1, 3, 4])
def test_another_number_of_ranks_refuses_it(ranks: Ranks, tmp_path: Path, count: int) -> None:
    ranks.run(2, write, tmp_path)
    alone = [refusals(0, tmp_path, 0, "divided")]  # in a process without torch.distributed
    for said in ranks.run(count, refusals, tmp_path, 0, "divided") + alone:
        assert all("expected all rows, or this rank's. A file by torch.save has" in each for each in said)


def test_a_file_of_a_single_rank_has_all_rows(ranks: Ranks, tmp_path: Path) -> None:
    (expected,) = ranks.run(1, write, tmp_path)
    for placement in ("divided", "everywhere"):
        for found in ranks.run(2, read, tmp_path, 0, placement):
            torch.testing.assert_close(found, expected, rtol=0, atol=0)


def pickle_everything(rank: int) -> None:
    table, optimizer = tables(seed=1)
    for whole in (nn.Sequential(table), table.weight, optimizer, ShardedEmbeddingCollection({"user": (ROWS, WIDTH)})):
        for action in (pickle.dumps, partial(torch.save, f=io.BytesIO())):
            with pytest.raises(
                TypeError, match=r"cannot be pickled, as by torch.save: .* Save state dicts with torch."
            ):
                action(whole)
    pickle.dumps(table.to_embedding())


def test_a_module_that_belongs_to_a_process_group_says_how_to_save_it(ranks: Ranks) -> None:
    ranks.run(2, pickle_everything)

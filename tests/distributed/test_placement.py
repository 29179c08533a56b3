"""Who owns which row: the arithmetic of placements, how evenly they divide work and memory, and the bytes they cost."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor import Shard

from rowstep import DeferredAdam, SparseAdam
from rowstep._layout import RowOrder, blocks
from rowstep.distributed import ShardedEmbedding, ShardedEmbeddingBag, ShardedEmbeddingCollection
from rowstep.distributed._collection import SMALL_TABLE_ROWS
from rowstep.distributed._lookup import JointLookup
from rowstep.distributed._traffic import count_traffic
from tests.helpers.ranks import Ranks

# The order of rows


@given(st.integers(0, 20_000))
@example(0)
@example(1)
@example(46341)
@example(46342)
@example(1_000_000)
def test_every_row_of_any_table_has_one_position(rows: int) -> None:
    order, ids = RowOrder.spread(rows), torch.arange(rows)
    positions = order.positions(ids)
    assert torch.equal(positions.sort().values, ids)
    assert torch.equal(order.ids(positions), ids)


@given(st.integers(2**31, 2**42), st.lists(st.integers(0, 2**42 - 1), min_size=1, max_size=20))
@example(3037000499, [3037000498])  # the last number of rows whose products fit into 63 bits
@example(3037000500, [3037000499])
@example(2**42, [2**42 - 1])
def test_numbers_beyond_the_square_root_of_63_bits_are_those_of_python(rows: int, numbers: list[int]) -> None:
    ids = [number % rows for number in numbers]
    order = RowOrder.spread(rows)
    positions = order.positions(torch.tensor(ids))
    assert positions.tolist() == [(order.multiplier * i + order.offset) % rows for i in ids]
    assert order.ids(positions).tolist() == ids
    with pytest.raises(ValueError, match="expected at most 4398046511104"):
        RowOrder.spread(2**42 + 1)


# Blocks


@given(st.integers(0, 300), st.integers(1, 20))
@example(5, 4)  # the last rank owns nothing
@example(1, 8)
@example(0, 3)
def test_blocks_hold_every_row_once_and_are_cut_as_torch_cuts(rows: int, ranks: int) -> None:
    owned = blocks(rows, ranks)
    assert [position for block in owned for position in block] == list(range(rows))
    for rank, block in enumerate(owned):
        size, start = Shard.local_shard_size_and_offset(rows, ranks, rank)
        assert len(block) == size
        assert not len(block) or block.start == start


# Load


def zipf_ids(rows: int, count: int, exponent: float, generator: torch.Generator) -> Tensor:
    """Ids that are sorted by popularity: the most frequent is 0."""
    shares = torch.arange(1, rows + 1, dtype=torch.float64).pow(-exponent).cumsum(0)
    drawn = torch.rand(count, generator=generator, dtype=torch.float64) * shares[-1]
    return torch.searchsorted(shares, drawn).clamp(max=rows - 1)


def busiest_over_mean(order: RowOrder, ids_of_ranks: list[Tensor]) -> float:
    """How many rows the busiest rank is asked for, over the mean; each rank asks for a row once."""
    ranks = len(ids_of_ranks)
    load, block = torch.zeros(ranks), len(blocks(order.rows, ranks)[0])
    for ids in ids_of_ranks:
        load += torch.bincount(torch.unique(order.positions(ids)) // block, minlength=ranks)
    return float(load.max() / load.mean())


@pytest.mark.parametrize(
    ("rows", "exponent", "stride"), [(100_000, 1.05, 1), (1_000_000, 1.2, 1), (1_000_000, 1.05, 4096)]
)
def test_no_rank_has_a_tenth_more_work_than_the_mean(rows: int, exponent: float, stride: int) -> None:
    """Popular ids lie at a stride where an id is made of a field's number and a value."""
    generator = torch.Generator().manual_seed(3)
    popular = [zipf_ids(rows, 16_384, exponent, generator) for _ in range(8)]
    parts = [ids * stride % rows + ids * stride // rows % stride for ids in popular]
    assert busiest_over_mean(RowOrder.spread(rows), parts) <= 1.1
    assert stride > 1 or busiest_over_mean(RowOrder.by_id(rows), parts) > 4


# Memory


def memory_of_a_rank(rank: int) -> int:
    table = ShardedEmbedding(1003, 7)
    assert table._shard.order == RowOrder.spread(1003), "the order of rows depends on the ranks"
    optimizer = DeferredAdam(table, amsgrad=True)
    for _ in range(2):
        table(torch.arange(0, 1003, 3)).sum().backward()
        optimizer.step()
    held = [*table.parameters(), *table.buffers(), *optimizer.state[table.weight].values()]
    return sum(tensor.untyped_storage().nbytes() for tensor in held)


def test_weights_and_moments_of_a_rank_are_its_share(ranks: Ranks) -> None:
    """Counted in the storages that are really there."""
    assert max(ranks.run(4, memory_of_a_rank)) <= 1.05 / 4 * memory_of_a_rank(0)


# Bytes on the wire

ROWS, WIDTH, IDS = 50_000, 16, 2000


def traffic_of_a_step(rank: int, kind: str) -> dict[str, Any]:
    """What one training step sends, and what it ought to by the formula's own arguments."""
    ranks, dtype = dist.get_world_size(), torch.float64 if kind == "float64" else torch.float32
    table: Any = ShardedEmbeddingBag(ROWS, WIDTH) if kind == "bag" else ShardedEmbedding(ROWS, WIDTH, dtype=dtype)
    optimizer = SparseAdam(table.parameters())
    ids = zipf_ids(ROWS, IDS, 1.05, torch.Generator().manual_seed(rank))
    owners = torch.bincount(RowOrder.spread(ROWS).positions(torch.unique(ids)) // -(-ROWS // ranks), minlength=ranks)
    with count_traffic() as forward:
        read = table(ids.view(-1, 4))
    with count_traffic() as backward:
        read.square().sum().backward()
    with count_traffic() as step:
        optimizer.step()
    return {"forward": forward.sent, "backward": backward.sent, "step": step.sent, "asked": owners.tolist()}


def traffic_of_steps(rank: int) -> list[dict[str, Any]]:
    """Of several kinds of table, and as if tables had 2^31 rows or more."""
    usual = JointLookup.__init__

    def with_long_numbers(self: JointLookup, *args: Any) -> None:
        usual(self, *args)
        self._key_dtype = torch.int64

    found = [traffic_of_a_step(rank, kind) for kind in ("embedding", "bag", "float64")]
    with mock.patch.object(JointLookup, "__init__", with_long_numbers):
        return [*found, traffic_of_a_step(rank, "embedding")]


def test_the_bytes_of_a_step_are_those_of_the_formula(ranks: Ranks) -> None:
    """That of docs/scaling.md."""
    count = 4
    sizes = ((4, 4), (4, 4), (8, 4), (4, 8))  # bytes of a weight, and of a row number
    for measured, (element, index) in zip(zip(*ranks.run(count, traffic_of_steps), strict=True), sizes, strict=True):
        sent = sum(sum(part["forward"].values()) + sum(part["backward"].values()) for part in measured) / count
        distinct = sum(sum(part["asked"]) for part in measured) / count
        expected = distinct * (count - 1) / count * (index + 2 * WIDTH * element) + 48 * (count - 1)
        assert sent == pytest.approx(expected, rel=0.02)
        for rank, part in enumerate(measured):
            from_others = sum(part["asked"]) - part["asked"][rank]
            for_others = sum(other["asked"][rank] for other in measured) - part["asked"][rank]
            assert part["forward"] == {
                "headers": 16 * (count - 1),
                "ids": index * from_others,
                "votes": 16 * (count - 1),
                "rows": element * WIDTH * for_others,
            }
            assert part["backward"] == {"headers": 16 * (count - 1), "gradients": element * WIDTH * from_others}
            assert part["step"] == {}, "an optimizer has nothing to send"


def bytes_of_a_collection(rank: int) -> None:
    """What a rank sends for a table everywhere, and what counts say that lie within each other."""
    torch.manual_seed(0)
    tables, count = ShardedEmbeddingCollection({"place": (90, 4)}), dist.get_world_size()
    ids = torch.arange(rank, 90, 2)
    with count_traffic() as outer:
        with count_traffic() as inner:
            torch.autograd.backward(tables({"place": ids})["place"].sum())
        with count_traffic() as empty:
            pass
        torch.autograd.backward(tables({"place": ids})["place"].sum())
    assert inner.total == len(ids) * (count - 1) * (4 + 4 * 4) + 48 * (count - 1)
    assert (outer.total, empty.total) == (2 * inner.total, 0)


def test_a_table_everywhere_sends_ids_and_gradients_to_every_rank(ranks: Ranks) -> None:
    ranks.run(3, bytes_of_a_collection)
    with count_traffic() as traffic:  # a single process sends nothing
        ShardedEmbedding(10, 2)(torch.arange(10)).sum().backward()
    assert traffic.total == 0


# Where tables are


def test_small_tables_are_everywhere_and_large_ones_divided_unless_the_plan_says_otherwise() -> None:
    sizes = {"tiny": (3, 2), "small": (SMALL_TABLE_ROWS, 2), "large": (SMALL_TABLE_ROWS + 1, 2)}
    tables = ShardedEmbeddingCollection(sizes)
    assert tables.plan == {"tiny": "everywhere", "small": "everywhere", "large": "divided"}
    assert "table 'large': 101 x 2, torch.float32, divided" in str(tables)
    plan = {"tiny": "divided", "large": "everywhere"}
    assert ShardedEmbeddingCollection(sizes, plan=plan).plan == {**plan, "small": "everywhere"}
    for place in ("rows", 0, None):
        with pytest.raises(ValueError, match=r"Invalid placement: .*; expected 'divided' or 'everywhere'"):
            ShardedEmbedding(10, 2, placement=place)  # type: ignore[arg-type]

"""Tables that are looked up together: as one process with plain tables, wherever the tables are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import rowstep
from rowstep.distributed import ShardedEmbeddingCollection, count_traffic
from tests.helpers.ranks import Ranks

DTYPE = torch.float64
Plain = nn.Embedding | nn.EmbeddingBag

PLANS: dict[str, dict[str, str]] = {
    "default": {},
    "divided": dict.fromkeys(("user", "item", "tags", "words", "place"), "divided"),
    "everywhere": dict.fromkeys(("user", "item", "tags", "words", "place"), "everywhere"),
    "mixed": {"user": "divided", "item": "divided", "tags": "everywhere", "words": "divided", "place": "everywhere"},
}


def plain_tables(dtype: torch.dtype = DTYPE) -> dict[str, Plain]:
    """Of several widths, in an order in which those of one kind do not follow each other."""
    torch.manual_seed(5)
    return {
        "user": nn.Embedding(103, 5, padding_idx=3, sparse=True, dtype=dtype),
        "tags": nn.EmbeddingBag(57, 3, mode="sum", include_last_offset=True, padding_idx=1, sparse=True, dtype=dtype),
        "item": nn.Embedding(61, 5, sparse=True, dtype=dtype),
        "words": nn.EmbeddingBag(29, 5, mode="mean", sparse=True, dtype=dtype),
        "place": nn.Embedding(7, 2, padding_idx=-1, sparse=True, dtype=dtype),
    }


def ids_of(step: int, rank: int) -> dict[str, Any]:
    """Now and then no ids for some tables, or the tables not named at all."""
    generator = torch.Generator().manual_seed(1000 * step + rank)

    def draw(rows: int, *shape: int) -> Tensor:
        return torch.randint(rows, shape, generator=generator) ** 2 // rows

    count = 0 if (step + rank) % 4 == 0 else 4 * (rank + 1)
    weights = torch.rand(count, generator=generator, dtype=DTYPE)
    ids: dict[str, Any] = {
        "place": draw(7, 2, count // 2),
        "user": draw(103, count),
        "tags": (draw(57, count), torch.arange(0, count + 1, 4), weights),
        "item": draw(61, count, 2),
        "words": draw(29, count, 3).to(torch.int32),
    }
    if (step + 2 * rank) % 5 == 0:
        del ids["item"]
    if step % 7 == rank:
        ids = {"place": ids["place"]}
    return ids


def loss_of(read: Mapping[str, Tensor]) -> Tensor:
    loss: Tensor = sum((value.sin() * torch.linspace(1, 2, value.shape[-1])).sum() for value in read.values())  # type: ignore[assignment]
    return loss


def read_plainly(tables: Mapping[str, Plain], ids: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: tables[name](*(each if isinstance(each, tuple) else (each,))) for name, each in ids.items()}


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "DeferredAdamW":
        return rowstep.DeferredAdamW(model, lr=0.01, weight_decay=0.1)
    return rowstep.SparseAdam(model.parameters(), lr=0.01)


STEPS = 30


def train_together(rank: int, plan: str, optimizer_name: str) -> dict[str, Tensor]:
    tables = ShardedEmbeddingCollection(plain_tables(), plan=PLANS[plan])
    optimizer = make_optimizer(optimizer_name, tables)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(tables(ids_of(step, rank))).backward()  # type: ignore[no-untyped-call]
        rowstep.clip_grad_norm_(tables.parameters(), 1.0)
        optimizer.step()
    return {name: tables[name].full_weight() for name in tables}


def train_alone(ranks: int, optimizer_name: str) -> dict[str, Tensor]:
    tables = plain_tables()
    model = nn.ModuleDict(tables)
    optimizer = make_optimizer(optimizer_name, model)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(ranks):
            (loss_of(read_plainly(tables, ids_of(step, rank))) / ranks).backward()  # type: ignore[no-untyped-call]
        rowstep.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return {name: table.weight.detach().clone() for name, table in tables.items()}


@pytest.mark.parametrize(
    ("count", "plan", "optimizer_name"),
    [
        (2, "divided", "SparseAdam"),
        (2, "everywhere", "DeferredAdamW"),
        (3, "mixed", "SparseAdam"),
        (4, "default", "DeferredAdamW"),
    ],
)
def test_ranks_end_where_one_process_ends(ranks: Ranks, count: int, plan: str, optimizer_name: str) -> None:
    expected, start = train_alone(count, optimizer_name), plain_tables()
    for tables in ranks.run(count, train_together, plan, optimizer_name):
        assert tables.keys() == expected.keys()
        for name, weight in expected.items():
            assert float((weight - start[name].weight.detach()).abs().max()) > 0.05, "nothing was trained"
            torch.testing.assert_close(tables[name], weight, rtol=0, atol=1e-12)


def test_a_process_on_its_own_needs_no_ranks() -> None:
    found = train_together(0, "mixed", "DeferredAdamW")
    for name, weight in train_alone(1, "DeferredAdamW").items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=1e-12)


# Mixed kinds


def mixed_kinds(rank: int) -> None:
    plain: dict[str, Plain] = {
        "short": nn.Embedding(31, 3, sparse=True, dtype=torch.float16),
        "narrow": nn.Embedding(31, 1, sparse=True),
        "long": nn.Embedding(31, 3, sparse=True, dtype=DTYPE),
        "none": nn.Embedding(31, 0, sparse=True),
        "frozen": nn.Embedding(31, 3, sparse=True),
        "bags": nn.EmbeddingBag(31, 5, mode="max", dtype=torch.bfloat16),
        "no rows": nn.Embedding(0, 4, sparse=True),
    }
    torch.manual_seed(1)
    for table in plain.values():
        table.weight.data.normal_()
    plain["frozen"].weight.requires_grad_(False)
    for places in ("divided", "everywhere"):
        tables = ShardedEmbeddingCollection(plain, plan=dict.fromkeys(plain, places))
        ids: dict[str, Any] = {
            name: torch.tensor([rank, 3, 3, 30]) for name in plain if name not in ("bags", "no rows")
        }
        ids |= {"bags": torch.tensor([[rank, 3], [3, 30]]), "no rows": torch.empty(0, dtype=torch.int64)}
        read = tables(ids)
        assert list(read) == list(plain)
        for name, value in read.items():
            assert torch.equal(value, plain[name](ids[name])), name
            assert value.requires_grad == (name != "frozen")
        torch.autograd.backward(sum(value.float().sum() for value in read.values() if value.requires_grad))
        for name in ("short", "narrow", "long"):
            grad = tables[name].weight.grad
            assert grad is not None
            assert grad.dtype == plain[name].weight.dtype
        assert tables["frozen"].weight.grad is None
        read["narrow"] = tables(ids)["narrow"]
        read["narrow"].mul_(2)  # as what nn.Embedding gives


def test_tables_of_any_widths_and_dtypes_travel_together(ranks: Ranks) -> None:
    ranks.run(2, mixed_kinds)


# What is left out


def leave_out(rank: int) -> list[dict[str, int | None]]:
    found = []
    for places in ("divided", "everywhere"):
        tables = ShardedEmbeddingCollection(plain_tables(), plan=dict.fromkeys(plain_tables(), places))
        read = tables({"user": torch.tensor([rank]), "item": torch.tensor([7]), "place": torch.tensor([1])})
        used = [read["user"].sum(), read["item"].sum()] if rank == 0 else [read["user"].sum()]
        torch.autograd.backward(used)
        grads = {name: tables[name].weight.grad for name in tables}
        found.append({name: None if grad is None else grad._nnz() for name, grad in grads.items()})
    return found


def test_a_table_that_a_rank_leaves_out_of_its_loss_is_not_touched_by_that_rank(ranks: Ranks) -> None:
    results = ranks.run(2, leave_out)
    for way in range(2):
        for name in ("place", "tags", "words"):
            assert all(result[way][name] is None for result in results)
        counts = {name: [result[way][name] for result in results] for name in ("user", "item")}
        assert counts == ({"user": [1, 1], "item": counts["item"]} if way == 0 else {"user": [2, 2], "item": [1, 1]})
        assert way == 1 or sum(counts["item"]) == 1


# Gradients that are added up


def accumulate(rank: int, places: str) -> dict[str, Tensor]:
    """First no rank has ids for any table, then for one: their gradients are empty when the next are added."""
    torch.manual_seed(0)
    plain = {"first": nn.Embedding(9, 3, dtype=DTYPE), "second": nn.Embedding(7, 3, dtype=DTYPE)}
    tables = ShardedEmbeddingCollection(
        {**plain, "bags": nn.EmbeddingBag(5, 3, mode="sum", dtype=DTYPE)}, plan=dict.fromkeys([*plain, "bags"], places)
    )
    nothing = torch.empty(0, dtype=torch.int64)
    several: list[dict[str, Tensor]] = [
        {"first": nothing, "second": nothing, "bags": nothing.view(0, 2)},
        {"first": torch.tensor([7, 8]), "second": nothing},
        {"first": torch.tensor([1]), "second": torch.tensor([3, 4]), "bags": torch.tensor([[1, 2]])},
        {"second": torch.tensor([6]), "bags": torch.tensor([[2, 2]])},
    ]
    for ids in several:
        read = tables(ids)
        for _ in range(2):
            torch.autograd.backward([value.sum() for value in read.values()], retain_graph=True)
    found = {}
    for name in tables:
        grad = tables[name].weight.grad
        full = torch.zeros(tables[name].num_embeddings, dtype=DTYPE)
        if grad is not None:
            order, mine = tables[name]._shard.order, tables[name]._shard.positions
            full[order.ids(torch.arange(mine.start, mine.stop))] = grad.to_dense()[:, 0]
        if dist.is_initialized() and places != "everywhere":
            dist.all_reduce(full)
        found[name] = full
    return found


@pytest.mark.parametrize("places", ["divided", "everywhere"])
def test_gradients_of_several_lookups_are_added_up(ranks: Ranks, places: str) -> None:
    expected = {"first": [0, 2, 0, 0, 0, 0, 0, 2, 2], "second": [0, 0, 0, 2, 2, 0, 2], "bags": [0, 2, 6, 0, 0]}
    for found in (accumulate(0, places), *ranks.run(3, accumulate, places)):
        assert {name: grad.tolist() for name, grad in found.items()} == expected


# Messages


def count_messages(rank: int) -> list[dict[str, int]]:
    found = []
    for count in (1, 2, 40):
        torch.manual_seed(0)
        tables = ShardedEmbeddingCollection({f"table {n}": (150 - n % 3 * 60, 3 + n % 3) for n in range(count)})
        optimizer = rowstep.SparseAdam(tables.parameters())
        with count_traffic() as traffic:
            read = tables({name: torch.arange(10 + rank) for name in tables})
            torch.autograd.backward([value.sum() for value in read.values()])
            optimizer.step()
        found.append(traffic.collectives)
    return found


def test_there_are_six_collectives_for_any_number_of_tables(ranks: Ranks) -> None:
    for found in ranks.run(3, count_messages):
        assert found == [{"headers": 2, "ids": 1, "votes": 1, "rows": 1, "gradients": 1}] * 3

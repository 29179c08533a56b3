"""Tables that are looked up together: as one process with plain tables, wherever the tables are.

Random programs, with empty micro-batches and gradients that add up, end where one process ends. Each seed is a program,
with the optimizers in turn. ``ROWSTEP_LONG=1`` runs a hundred.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rowstep
from rowstep.distributed import ShardedEmbeddingCollection, count_traffic
from tests.helpers.ranks import Ranks

DTYPE = torch.float64
Plain = nn.Embedding | nn.EmbeddingBag

SIZES = {"user": (103, 5), "tags": (57, 3), "item": (61, 5), "words": (29, 5), "place": (7, 2)}


def mixed_kinds(rank: int) -> None:
    torch.manual_seed(1)
    plain: dict[str, Plain] = {
        "short": nn.Embedding(31, 3, sparse=True, dtype=torch.float16),
        "narrow": nn.Embedding(31, 1, sparse=True),
        "long": nn.Embedding(31, 3, sparse=True, dtype=DTYPE),
        "none": nn.Embedding(31, 0, sparse=True),
        "frozen": nn.Embedding(31, 3, sparse=True),
        "bags": nn.EmbeddingBag(31, 5, mode="max", dtype=torch.bfloat16),
        "no rows": nn.Embedding(0, 4, sparse=True),
    }
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
            assert tables[name].weight.grad.dtype == plain[name].weight.dtype  # type: ignore[union-attr]
        assert tables["frozen"].weight.grad is None
        read["narrow"] = tables(ids)["narrow"]
        read["narrow"].mul_(2)  # as what nn.Embedding gives


def test_tables_of_any_widths_and_dtypes_travel_together(ranks: Ranks) -> None:
    ranks.run(2, mixed_kinds)


def leave_out(rank: int) -> list[dict[str, int | None]]:
    found = []
    for places in ("divided", "everywhere"):
        torch.manual_seed(5)
        tables = ShardedEmbeddingCollection(SIZES, plan=dict.fromkeys(SIZES, places))
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


OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda params: rowstep.SparseAdam(params, lr=0.01),
    lambda params: rowstep.SparseAdam(params, lr=0.01, bias_correction="row", amsgrad=True),
    lambda params: rowstep.SparseAdam(params, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True),
    lambda params: rowstep.SparseAdam(params, lr=0.01, weight_decay=0.1, nonfinite="raise"),
    lambda params: rowstep.SparseAdam(params, lr=0.01, second_moment="row"),
    lambda params: torch.optim.SparseAdam(list(params), lr=0.01),
    lambda params: rowstep.DeferredAdam(params, lr=0.01),
    lambda params: rowstep.DeferredAdam(params, lr=0.01, amsgrad=True, betas=(0.8, 0.99)),
    lambda params: rowstep.DeferredAdam(params, lr=torch.tensor(0.01), maximize=True, eps=1e-6),
    lambda params: rowstep.DeferredAdamW(params, lr=0.01, weight_decay=0.3),
]
PROGRAMS = 100 if os.environ.get("ROWSTEP_LONG") else len(OPTIMIZERS)


class Program:
    """What a seed stands for. Every rank and the single process draw the same one."""

    def __init__(self, seed: int) -> None:
        draw = self._draw = random.Random(seed)
        torch.manual_seed(seed)
        self.tables: dict[str, Plain] = {f"t{number}": self._table() for number in range(draw.randint(1, 4))}
        self.places = {name: draw.choice(["divided", "divided", "everywhere"]) for name in self.tables}
        steps, self.limit = draw.randint(3, 8), draw.choice([None, 0.5])
        self.passes = [draw.randint(1, 4) for _ in range(steps)]
        self.seed = seed

    def _table(self) -> Plain:
        draw = self._draw
        rows, width = draw.choice([1, 2, 7, 40]), draw.choice([1, 2, 3])
        padding = draw.choice([None, rows - 1])
        if draw.random() < 0.6:
            return nn.Embedding(rows, width, padding_idx=padding, sparse=True, dtype=DTYPE)
        mode, last = draw.choice(["sum", "mean"]), draw.choice([False, True])
        return nn.EmbeddingBag(
            rows, width, mode=mode, padding_idx=padding, include_last_offset=last, sparse=True, dtype=DTYPE
        )

    def ids(self, step: int, micro: int, rank: int) -> dict[str, Any]:
        """Now and then a table is left out, has no ids, or has one id many times, which another rank may own.

        Of a bag there may be offsets and weights, and ids of int32.

        The first is never left out: a rank takes part in a backward pass by what it has looked up.
        """
        draw = random.Random(f"{self.seed} {step} {micro} {rank}")
        found: dict[str, Any] = {}
        all_empty = draw.random() < 0.3
        for name, table in self.tables.items():
            if found and draw.random() < 0.15:
                continue
            count = 0 if all_empty else draw.choice([0, 1, 5])
            rows, shape = table.num_embeddings, (count, 2) if isinstance(table, nn.EmbeddingBag) else (count,)
            generator = torch.Generator().manual_seed(draw.getrandbits(40))
            drawn = torch.randint(rows, shape, generator=generator)
            found[name] = ids = drawn if draw.random() < 0.7 else torch.full(shape, draw.randrange(rows))
            if isinstance(table, nn.EmbeddingBag) and table.mode == "sum" and draw.random() < 0.5:
                weights = torch.rand(ids.numel(), generator=generator, dtype=DTYPE)
                ends = torch.arange(0, ids.numel() + table.include_last_offset, 2)
                found[name] = (ids.flatten(), ends, weights)
            elif draw.random() < 0.3:
                found[name] = ids.to(torch.int32)
        return found

    def loss(self, read: Mapping[str, Tensor]) -> Tensor:
        parts = [(value.sin() * torch.linspace(1, 2, value.shape[-1], dtype=DTYPE)).sum() for value in read.values()]
        return torch.stack(parts).sum()

    def train(self, model: nn.Module, losses: Callable[[int, int], Iterable[Tensor]]) -> None:
        optimizer = OPTIMIZERS[self.seed % len(OPTIMIZERS)](model.parameters())
        for step, passes in enumerate(self.passes):
            optimizer.zero_grad()
            for micro in range(passes):
                for loss in losses(step, micro):
                    torch.autograd.backward(loss)
            if self.limit is not None:
                rowstep.clip_grad_norm_(model.parameters(), self.limit)
            optimizer.step()


def train_together(rank: int, seed: int) -> dict[str, Tensor]:
    program = Program(seed)
    tables = ShardedEmbeddingCollection(program.tables, plan=program.places)
    program.train(tables, lambda step, micro: [program.loss(tables(program.ids(step, micro, rank)))])
    return {name: tables[name].full_weight() for name in tables}


def train_alone(seed: int, ranks: int) -> dict[str, Tensor]:
    program = Program(seed)

    def losses(step: int, micro: int) -> Iterator[Tensor]:
        for rank in range(ranks):
            ids = program.ids(step, micro, rank)
            read = {
                name: program.tables[name](*(each if isinstance(each, tuple) else (each,)))
                for name, each in ids.items()
            }
            yield program.loss(read) / ranks

    program.train(nn.ModuleDict(program.tables), losses)
    return {name: table.weight.detach().clone() for name, table in program.tables.items()}


@pytest.mark.parametrize("seed", range(PROGRAMS))
def test_a_random_program_ends_where_one_process_ends(ranks: Ranks, seed: int) -> None:
    count = 1 + seed % 4
    expected = train_alone(seed, count)
    for found in ranks.run(count, train_together, seed) if count > 1 else [train_together(0, seed)]:
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)

"""Tables that are looked up together: as one process with plain tables, wherever the tables are.

Random programs, with empty micro-batches and gradients that add up, end where one process ends, also where another
number of ranks goes on from a checkpoint. Each seed is a program, with the optimizers in turn. ``ROWSTEP_LONG=1`` runs
200.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_saver

import rowstep
from rowstep.distributed import ShardedEmbeddingCollection, ddp, load
from rowstep.distributed._traffic import count_traffic
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
    lambda params: rowstep.SparseAdam(params, lr=0.01, weight_decay=0.1, nonfinite="skip"),
    lambda params: rowstep.SparseAdam(params, lr=0.01, second_moment="row"),
    lambda params: torch.optim.SparseAdam(list(params), lr=0.01),
    lambda params: rowstep.DeferredAdam(params, lr=0.01),
    lambda params: rowstep.DeferredAdam(params, lr=0.01, amsgrad=True, betas=(0.8, 0.99)),
    lambda params: rowstep.DeferredAdam(params, lr=torch.tensor(0.01), maximize=True, eps=1e-6),
    lambda params: rowstep.DeferredAdamW(params, lr=0.01, weight_decay=0.3),
]
PROGRAMS = 200 if os.environ.get("ROWSTEP_LONG") else 12


class Program:
    """What a seed stands for. Every rank and the single process draw the same one."""

    def __init__(self, seed: int) -> None:
        draw = self._draw = random.Random(seed)
        torch.manual_seed(seed)
        self.tables: dict[str, Plain] = {f"t{number}": self._table() for number in range(draw.randint(1, 4))}
        sharded = list(self.tables)
        if draw.random() < 0.4:
            self.tables["plain"] = self._table()  # on every rank, for ddp to average
        self.limit, self.seed = draw.choice([None, 0.5]), seed
        self.make = OPTIMIZERS[seed % len(OPTIMIZERS)]
        # For every run: how many ranks, where each table is, and how many backward passes each step has. All but the
        # first go on from a checkpoint, which torch's optimizer has none of.
        self.runs: list[tuple[int, dict[str, str], list[int]]] = []
        for run in range(1 if self.make is OPTIMIZERS[5] else draw.randint(1, 3)):
            count = 1 + seed % 4 if run == 0 else draw.choice([n for n in (1, 2, 3, 4) if n != self.runs[-1][0]])
            places = {name: draw.choice(["divided", "divided", "everywhere"]) for name in sharded}
            self.runs.append((count, places, [draw.randint(1, 4) for _ in range(draw.randint(2, 6))]))

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

    def ids(self, now: tuple[int, ...]) -> dict[str, Any]:
        """Of a run, step, micro-batch and rank.

        Now and then a table is left out, has no ids, or has one id many times, which another rank may own. Of a bag
        there may be offsets and weights, and ids of int32.

        The first is never left out, nor the plain one: a rank takes part in a backward pass, of the tables' and of
        torch's DDP, by what it has looked up.
        """
        draw = random.Random(f"{self.seed} {now}")
        found: dict[str, Any] = {}
        all_empty = draw.random() < 0.3
        for name, table in self.tables.items():
            if found and name != "plain" and draw.random() < 0.15:
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

    def train(self, run: int, model: nn.Module, optimizer: Any, losses: Callable[[int, int], Iterable[Tensor]]) -> None:
        for step, passes in enumerate(self.runs[run][2]):
            optimizer.zero_grad()
            for micro in range(passes):
                for loss in losses(step, micro):
                    torch.autograd.backward(loss)
            if self.limit is not None:
                rowstep.clip_grad_norm_(model.parameters(), self.limit)
            optimizer.step()


class Model(nn.Module):
    """The tables of a program, where a run has them."""

    def __init__(self, program: Program, run: int) -> None:
        super().__init__()
        places = program.runs[run][1]
        self.sharded = ShardedEmbeddingCollection({name: program.tables[name] for name in places}, plan=places)
        self.plain = nn.ModuleDict({name: table for name, table in program.tables.items() if name not in places})

    def forward(self, ids: dict[str, Any]) -> dict[str, Tensor]:
        read: dict[str, Tensor] = self.sharded({name: ids[name] for name in ids if name not in self.plain})
        return read | {name: look_up(table, ids[name]) for name, table in self.plain.items() if name in ids}


def look_up(table: nn.Module, ids: Any) -> Tensor:
    result: Tensor = table(*(ids if isinstance(ids, tuple) else (ids,)))
    return result


def train_together(rank: int, seed: int, run: int, path: Path) -> dict[str, Tensor]:
    program = Program(seed)
    model: Any = Model(program, run)
    wrapped = ddp(model) if len(model.plain) and dist.is_initialized() else model
    optimizer = program.make(model.parameters())
    if run > 0:
        load({"model": model, "optimizer": optimizer}, path / str(run - 1))
    program.train(run, model, optimizer, lambda *now: [program.loss(wrapped(program.ids((run, *now, rank))))])
    if run + 1 < len(program.runs):
        state_dict_saver.save({"model": model, "optimizer": optimizer}, checkpoint_id=path / str(run))
    whole: dict[str, Tensor] = {name: model.sharded[name].full_weight() for name in model.sharded}
    return whole | {name: table.weight.detach().clone() for name, table in model.plain.items()}


def train_alone(seed: int) -> dict[str, Tensor]:
    program = Program(seed)
    model = nn.ModuleDict(program.tables)
    optimizer = program.make(model.parameters())

    def losses(run: int, *now: int) -> Iterator[Tensor]:
        ranks = program.runs[run][0]
        for ids in (program.ids((run, *now, rank)) for rank in range(ranks)):
            yield program.loss({name: look_up(program.tables[name], ids[name]) for name in ids}) / ranks

    for run in range(len(program.runs)):
        program.train(run, model, optimizer, partial(losses, run))
    return {name: table.weight.detach().clone() for name, table in program.tables.items()}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
@pytest.mark.parametrize("seed", range(PROGRAMS))
def test_a_random_program_ends_where_one_process_ends(ranks: Ranks, tmp_path: Path, seed: int) -> None:
    for run, (count, *_) in enumerate(Program(seed).runs):
        arguments = (seed, run, tmp_path)
        ends = ranks.run(count, train_together, *arguments) if count > 1 else [train_together(0, *arguments)]
    for found in ends:
        torch.testing.assert_close(found, train_alone(seed), rtol=0, atol=1e-11)

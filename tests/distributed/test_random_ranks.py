"""Random programs over ranks, with empty micro-batches and gradients that add up, end where one process ends.

Each seed is a program, with the optimizers in turn. ``ROWSTEP_LONG=1`` runs a hundred.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rowstep
from rowstep.distributed import ShardedEmbeddingCollection
from tests.helpers.ranks import Ranks

DTYPE = torch.float64
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
Plain = nn.Embedding | nn.EmbeddingBag


class Program:
    """What a seed stands for. Every rank and the single process draw the same one."""

    def __init__(self, seed: int) -> None:
        draw = self._draw = random.Random(seed)
        torch.manual_seed(seed)
        self.tables: dict[str, Plain] = {f"t{number}": self._table() for number in range(draw.randint(1, 4))}
        self.places = {name: draw.choice(["divided", "divided", "everywhere"]) for name in self.tables}
        self.steps, self.limit = draw.randint(3, 8), draw.choice([None, 0.5])
        self.passes = [draw.randint(1, 4) for _ in range(self.steps)]
        self.seed = seed

    def _table(self) -> Plain:
        draw = self._draw
        rows, width = draw.choice([1, 2, 7, 40]), draw.choice([1, 2, 3])
        padding = draw.choice([None, rows - 1])
        if draw.random() < 0.6:
            return nn.Embedding(rows, width, padding_idx=padding, sparse=True, dtype=DTYPE)
        mode = draw.choice(["sum", "mean"])
        return nn.EmbeddingBag(rows, width, mode=mode, padding_idx=padding, sparse=True, dtype=DTYPE)

    def ids(self, step: int, micro: int, rank: int) -> dict[str, Tensor]:
        """Now and then a table is left out, has no ids, or has one id many times, which another rank may own.

        The first is never left out: a rank takes part in a backward pass by what it has looked up.
        """
        draw = random.Random(f"{self.seed} {step} {micro} {rank}")
        found: dict[str, Tensor] = {}
        all_empty = draw.random() < 0.3
        for name, table in self.tables.items():
            if found and draw.random() < 0.15:
                continue
            count = 0 if all_empty else draw.choice([0, 1, 5])
            rows, shape = table.num_embeddings, (count, 2) if isinstance(table, nn.EmbeddingBag) else (count,)
            generator = torch.Generator().manual_seed(draw.getrandbits(40))
            drawn = torch.randint(rows, shape, generator=generator)
            found[name] = drawn % rows if draw.random() < 0.7 else torch.full(shape, draw.randrange(rows))
        return found

    def loss(self, read: Mapping[str, Tensor]) -> Tensor:
        parts = [(value.sin() * torch.linspace(1, 2, value.shape[-1], dtype=DTYPE)).sum() for value in read.values()]
        return torch.stack(parts).sum()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.seed % len(OPTIMIZERS)](model.parameters())


def train_together(rank: int, seed: int) -> dict[str, Tensor]:
    program = Program(seed)
    tables = ShardedEmbeddingCollection(program.tables, plan=program.places)
    optimizer = program.optimizer(tables)
    for step in range(program.steps):
        optimizer.zero_grad()
        for micro in range(program.passes[step]):
            torch.autograd.backward(program.loss(tables(program.ids(step, micro, rank))))
        if program.limit is not None:
            rowstep.clip_grad_norm_(tables.parameters(), program.limit)
        optimizer.step()
    return {name: tables[name].full_weight() for name in tables}


def train_alone(seed: int, ranks: int) -> dict[str, Tensor]:
    program = Program(seed)
    model = nn.ModuleDict(program.tables)
    optimizer = program.optimizer(model)
    for step in range(program.steps):
        optimizer.zero_grad()
        for micro in range(program.passes[step]):
            for rank in range(ranks):
                read: dict[str, Any] = {
                    name: program.tables[name](ids) for name, ids in program.ids(step, micro, rank).items()
                }
                torch.autograd.backward(program.loss(read) / ranks)
        if program.limit is not None:
            rowstep.clip_grad_norm_(model.parameters(), program.limit)
        optimizer.step()
    return {name: table.weight.detach().clone() for name, table in program.tables.items()}


@pytest.mark.parametrize("seed", range(PROGRAMS))
def test_a_random_program_ends_where_one_process_ends(ranks: Ranks, seed: int) -> None:
    count = 2 + seed % 3 % 2
    expected = train_alone(seed, count)
    for found in ranks.run(count, train_together, seed):
        for name, weight in expected.items():
            torch.testing.assert_close(found[name], weight, rtol=0, atol=1e-11)

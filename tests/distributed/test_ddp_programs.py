"""Random programs with replicated tables under ``ddp``, where ranks look up no ids, only padding, or nothing at all.

They end where one process with everybody's batches ends: the same weights, and the same number of steps of each table.
Each seed is a program. ``ROWSTEP_LONG=1`` runs 200 instead of 24, half of them at 2 ranks and half at 3.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rowstep
from rowstep.distributed import ddp
from tests.helpers.ranks import Ranks

# In float32, sums in another order may turn the sign of a small gradient, and with it the step of Adam.
DTYPE = torch.float64
PADDING = 0
PROGRAMS = 100 if os.environ.get("ROWSTEP_LONG") == "1" else 12  # for each number of ranks

OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda model: rowstep.SparseAdam(model.parameters(), lr=0.05),
    lambda model: rowstep.SparseAdam(model.parameters(), lr=0.05, bias_correction="row"),
    lambda model: rowstep.DeferredAdamW(model, lr=0.05, weight_decay=0.1),
]
DEFERRED = 2


class Tables(nn.Module):
    """Some tables that every rank has whole, and perhaps a factor for what they give."""

    tables: Any

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        torch.manual_seed(draw.getrandbits(32))
        self.tables = nn.ModuleList()
        for _ in range(draw.randint(1, 3)):
            rows, width = draw.randint(2, 9), draw.randint(1, 3)
            kind: Any = draw.choice([nn.Embedding, nn.EmbeddingBag])
            self.tables.append(kind(rows, width, padding_idx=PADDING, sparse=True, dtype=DTYPE))
        self.scale = nn.Parameter(torch.ones((), dtype=DTYPE)) if draw.random() < 0.6 else None

    def forward(self, batch: list[tuple[Tensor, bool] | None]) -> list[Tensor]:
        """The terms of a loss. Of each table: no lookup, or ids and whether the loss depends on what they give."""
        terms = [self.scale.sin()] if self.scale is not None else []
        for table, lookup in zip(self.tables, batch, strict=True):
            if lookup is not None:
                ids, is_in_loss = lookup
                read = table(ids).sin().sum()
                terms += [read if self.scale is None else read * self.scale] if is_in_loss else []
        return terms


class Program:
    """A run of what a seed stands for: on one of the ranks, or alone with the batches of all of them."""

    def __init__(self, seed: int, ranks: int, rank: int | None) -> None:
        self.draw, self.ranks = random.Random(seed), ranks
        self.batches = range(ranks) if rank is None else [rank]
        self.module = Tables(self.draw)
        self.model: Any = self.module if rank is None else ddp(self.module)
        self.is_alone = rank is None
        self.optimizer = OPTIMIZERS[seed % len(OPTIMIZERS)](self.module)

    def batch(self) -> list[tuple[Tensor, bool] | None]:
        draw = self.draw
        lookups: list[tuple[Tensor, bool] | None] = []
        for table in self.module.tables:
            kind = draw.choice(["rows", "empty", "padding", "left out", "left out", "not in the loss"])
            count = 0 if kind == "empty" else draw.randint(1, 4)
            rows = 1 if kind == "padding" else table.num_embeddings
            ids = torch.tensor([draw.randrange(PADDING, rows) for _ in range(2 * count)])
            lookups.append(None if kind == "left out" else (ids.long().view(count, 2), kind != "not in the loss"))
        if self.module.scale is None and not any(lookup and lookup[1] for lookup in lookups):
            # DDP wants a loss that depends on something; no ids will do.
            lookups[draw.randrange(len(lookups))] = torch.empty(0, 2, dtype=torch.int64), True
        return lookups

    def backward(self) -> None:
        batches = [self.batch() for _ in range(self.ranks)]  # every rank draws those of all
        terms = [term for rank in self.batches for term in self.model(batches[rank])]
        torch.autograd.backward(torch.stack(terms).sum() / len(self.batches))

    def run(self) -> tuple[list[Tensor], list[int | None]]:
        for _ in range(self.draw.randint(2, 6)):
            self.optimizer.zero_grad(set_to_none=self.draw.random() < 0.8)
            with contextlib.nullcontext() if self.is_alone else self.model.no_sync():
                for _ in range(self.draw.choice([0, 0, 1, 2])):
                    self.backward()
            for _ in range(self.draw.choice([1, 1, 2])):
                self.backward()
            self.optimizer.step()
        states = self.optimizer.state_dict()["state"]
        weights = [param.detach().clone() for param in self.module.parameters()]
        return weights, [int(states[number]["step"]) if number in states else None for number in range(len(weights))]


def run_all(rank: int | None, ranks: int, seeds: range) -> list[tuple[list[Tensor], list[int | None]]]:
    return [Program(seed, ranks, rank).run() for seed in seeds]


@pytest.mark.parametrize("count", [2, 3])
def test_random_programs_end_where_one_process_ends(ranks: Ranks, count: int) -> None:
    for first in range(0, PROGRAMS, 25):  # ranks have to answer in time
        seeds = range(first, min(first + 25, PROGRAMS))
        expected = run_all(None, count, seeds)
        found = ranks.run(count, run_all, count, seeds)
        for seed, (weights, steps), *of_ranks in zip(seeds, expected, *found, strict=True):
            for rank, (weights_there, steps_there) in enumerate(of_ranks):
                assert steps_there == steps, f"program {seed}, rank {rank}"
                torch.testing.assert_close(weights_there, weights, rtol=0, atol=1e-12)
                if seed % len(OPTIMIZERS) != DEFERRED:  # where rows catch up when this rank reads them
                    torch.testing.assert_close(weights_there, of_ranks[0][0], rtol=0, atol=0)

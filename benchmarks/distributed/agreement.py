"""Whether tables on several ranks end where one process ends that holds them whole."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.cases import Case, short
from rowstep import DeferredAdamW, SparseAdam
from rowstep.distributed import ShardedEmbedding, ShardedEmbeddingBag
from tests.helpers.ranks import Ranks

TOLERANCES = {"float32": 1e-6, "float64": 1e-12}
KINDS = ("Embedding", "EmbeddingBag, sum", "EmbeddingBag, mean")
OPTIMIZERS = ("SparseAdam", "DeferredAdamW")
BAG = 4
LEARNING_RATE = 0.01  # large enough for 50 steps to matter


@dataclass(frozen=True)
class Agreement:
    about: str
    ranks: int
    dtype: str
    differences: dict[str, float]  # the largest of any weight on any rank, by optimizer and kind of table

    @property
    def worst(self) -> float:
        return max(self.differences.values())


def compare(ranks: Ranks, counts: tuple[int, ...], case: Case, steps: int) -> Iterator[Agreement]:
    about = f"{short(case.rows)} x {case.dim}, {steps} steps"
    for count in counts:
        for dtype in TOLERANCES:
            differences = ranks.run(count, _differences, count, case, steps, dtype)
            # Not max(): it would pass over a NaN.
            worst = {what: largest([found[what] for found in differences]) for what in differences[0]}
            yield Agreement(about, count, dtype, worst)


def largest(numbers: list[float]) -> float:
    return math.inf if any(map(math.isnan, numbers)) else max(numbers)


def _differences(rank: int, ranks: int, case: Case, steps: int, dtype: str) -> dict[str, float]:
    """Of the whole table on this rank to that of one process, which is trained beside it."""
    found = {}
    for optimizer in OPTIMIZERS:
        for kind in KINDS:
            alone = _plain(kind, case, getattr(torch, dtype))
            shared = _sharded(alone)
            _train(alone, optimizer, range(ranks), case, steps, share=1 / ranks)
            _train(shared, optimizer, [rank], case, steps, share=1)
            alone.eval()  # brings the rows that wait up to date
            difference = shared.full_weight() - alone.weight.detach()
            found[f"{optimizer}, {kind}"] = difference.abs().max().item()
    return found


def _plain(kind: str, case: Case, dtype: torch.dtype) -> Any:
    torch.manual_seed(7)
    name, _, mode = kind.partition(", ")
    if name == "Embedding":
        return nn.Embedding(case.rows, case.dim, padding_idx=3, sparse=True, dtype=dtype)
    return nn.EmbeddingBag(case.rows, case.dim, mode=mode, padding_idx=3, sparse=True, dtype=dtype)


def _sharded(table: nn.Embedding | nn.EmbeddingBag) -> ShardedEmbedding | ShardedEmbeddingBag:
    if isinstance(table, nn.Embedding):
        return ShardedEmbedding.from_embedding(table)
    return ShardedEmbeddingBag.from_embedding(table)


def _train(table: Any, name: str, parts: range | list[int], case: Case, steps: int, share: float) -> None:
    """On these ranks' parts of each batch, whose losses count with this share."""
    optimizer: torch.optim.Optimizer
    if name == "SparseAdam":
        optimizer = SparseAdam(table.parameters(), lr=LEARNING_RATE)
    else:
        optimizer = DeferredAdamW(table, lr=LEARNING_RATE)
    for step in range(steps):
        optimizer.zero_grad()
        for part in parts:
            torch.autograd.backward(_loss(table, _ids(step, part, case)) * share)
        optimizer.step()


def _ids(step: int, part: int, case: Case) -> Tensor:
    """More for higher ranks, and every third time none."""
    generator = torch.Generator().manual_seed(1_000 * step + part)
    count = 0 if (step + part) % 3 == 0 else case.ids * (part + 2) // 4 // BAG * BAG
    return torch.randint(case.rows, (count,), generator=generator) ** 2 // case.rows  # small ids are popular


def _loss(table: Any, ids: Tensor) -> Tensor:
    plain = isinstance(table, (nn.Embedding, ShardedEmbedding))
    rows = table(ids) if plain else table(ids, torch.arange(0, len(ids), BAG))
    loss: Tensor = (rows * torch.linspace(1, 2, rows.shape[-1], dtype=rows.dtype)).sin().sum()
    return loss

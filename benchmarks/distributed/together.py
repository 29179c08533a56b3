"""Whether tables that are looked up together, wherever they are, end where plain tables of one process end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.distributed.agreement import LEARNING_RATE, OPTIMIZERS, Agreement, largest
from rowstep import DeferredAdamW, SparseAdam
from rowstep.distributed import ShardedEmbeddingCollection
from tests.helpers.ranks import Ranks

DTYPE = torch.float64
PLANS = ("planned", "divided", "everywhere", "mixed")
MIXED: dict[str, str | int] = {
    "user": "divided",
    "item": 1,
    "tags": "everywhere",
    "words": 0,
    "pairs": "divided",
    "place": "everywhere",
}
BAG = 4


def compare(ranks: Ranks, counts: tuple[int, ...], steps: int) -> Iterable[Agreement]:
    about = f"{len(MIXED)} tables together, of several widths and kinds, {steps} steps"
    for count in counts:
        differences = ranks.run(count, _differences, count, steps)
        worst = {what: largest([found[what] for found in differences]) for what in differences[0]}
        yield Agreement(about, count, "float64", worst)


def _differences(rank: int, ranks: int, steps: int) -> dict[str, float]:
    """Of all tables on this rank to those of one process, which are trained beside them."""
    found = {}
    for optimizer in OPTIMIZERS:
        alone = _plain_tables()
        _train(alone, optimizer, range(ranks), steps, share=1 / ranks)
        alone.eval()  # brings the rows that wait up to date
        for plan in PLANS:
            plain: Any = dict(_plain_tables())
            shared = ShardedEmbeddingCollection(plain, plan=_places(plan))
            _train(shared, optimizer, [rank], steps, share=1)
            off = [(shared[name].full_weight() - alone.get_parameter(f"{name}.weight")).abs().max() for name in MIXED]
            found[f"{optimizer}, {plan}"] = largest([each.item() for each in off])
    return found


def _places(plan: str) -> Mapping[str, str | int]:
    if plan in ("divided", "everywhere"):
        return dict.fromkeys(MIXED, plan)
    return MIXED if plan == "mixed" else {}


def _plain_tables() -> nn.ModuleDict:
    """In an order in which those of one kind do not follow each other."""
    torch.manual_seed(5)
    own: dict[str, Any] = {"sparse": True, "dtype": DTYPE}
    return nn.ModuleDict(
        {
            "user": nn.Embedding(1_003, 16, padding_idx=3, **own),
            "tags": nn.EmbeddingBag(257, 8, mode="sum", include_last_offset=True, padding_idx=1, **own),
            "item": nn.Embedding(611, 16, **own),
            "words": nn.EmbeddingBag(129, 16, mode="mean", padding_idx=0, **own),
            "pairs": nn.EmbeddingBag(97, 5, mode="sum", **own),
            "place": nn.Embedding(7, 3, padding_idx=-1, **own),
        }
    )


def _train(tables: nn.Module, name: str, parts: Iterable[int], steps: int, share: float) -> None:
    """On these ranks' parts of each batch, whose losses count with this share."""
    parts = list(parts)
    optimizer: torch.optim.Optimizer
    if name == "SparseAdam":
        optimizer = SparseAdam(tables.parameters(), lr=LEARNING_RATE)
    else:
        optimizer = DeferredAdamW(tables, lr=LEARNING_RATE)
    for step in range(steps):
        optimizer.zero_grad()
        for part in parts:
            torch.autograd.backward(_loss(_read(tables, _ids(step, part))) * share)
        optimizer.step()


def _read(tables: nn.Module, ids: Mapping[str, Any]) -> dict[str, Tensor]:
    if isinstance(tables, ShardedEmbeddingCollection):
        read: dict[str, Tensor] = tables(ids)
        return read
    given = {name: each if isinstance(each, tuple) else (each,) for name, each in ids.items()}
    return {name: tables.get_submodule(name)(*arguments) for name, arguments in given.items()}


def _ids(step: int, part: int) -> dict[str, Any]:
    """More for higher ranks; every fourth time none, and now and then some tables are not named at all."""
    generator = torch.Generator().manual_seed(1_000 * step + part)

    def draw(rows: int, *shape: int) -> Tensor:
        return torch.randint(rows, shape, generator=generator) ** 2 // rows  # small ids are popular

    count = 0 if (step + part) % 4 == 0 else 8 * BAG * (part + 1)
    weights = torch.rand(count, generator=generator, dtype=DTYPE)
    ids: dict[str, Any] = {
        "place": draw(7, 2, count // 2),
        "user": draw(1_003, count),
        "tags": (draw(257, count), torch.arange(0, count + 1, BAG)),
        "item": draw(611, count, 2).to(torch.int32),
        "words": draw(129, count, 3),
        "pairs": (draw(97, count), torch.arange(0, count, BAG), weights),
    }
    if (step + 2 * part) % 5 == 0:
        del ids["item"], ids["tags"]
    return {"place": ids["place"]} if step % 7 == part else ids


def _loss(read: Mapping[str, Tensor]) -> Tensor:
    weighted = [(rows.sin() * torch.linspace(1, 2, rows.shape[-1], dtype=DTYPE)).sum() for rows in read.values()]
    return torch.stack(weighted).sum()

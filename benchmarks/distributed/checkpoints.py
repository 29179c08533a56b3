"""Save on some ranks, load on others, and go on: the same bits must come out.

Gradients are small multiples of 1/64, and ranks' gradients are summed: sums are then exact in any order, so not even
the steps after loading may differ with the number of ranks.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from benchmarks.cases import Case, short
from rowstep import DeferredAdamW, SparseAdam
from rowstep.distributed import ShardedEmbedding, load
from tests.helpers.ranks import Ranks

STEPS = 5  # before saving, and after it
OPTIMIZERS = ("SparseAdam by row", "DeferredAdamW")

Contents = dict[str, NDArray[Any]]  # whole tensors, by id; and counters


@dataclass(frozen=True)
class Resharding:
    about: str
    saved_by: int
    loaded_by: int
    different: int  # bytes, just after loading or after further steps
    compared: int


def reshard(ranks: Ranks, saved_by: int, loaded_by: tuple[int, ...], case: Case) -> Iterator[Resharding]:
    about = f"{short(case.rows)} x {case.dim}, {' and '.join(OPTIMIZERS)}"
    with tempfile.TemporaryDirectory() as directory:
        saved = ranks.run(saved_by, _save_and_go_on, saved_by, case, directory)[0]
        for count in loaded_by:
            pairs = [
                (expected, found)
                for on_rank in ranks.run(count, _load_and_go_on, count, case, directory)
                for expected, found in zip(saved, on_rank, strict=True)
            ]
            different = sum(_different_bytes(expected, found) for expected, found in pairs)
            compared = sum(array.nbytes for expected, _ in pairs for array in expected.values())
            yield Resharding(about, saved_by, count, different, compared)


def _save_and_go_on(rank: int, ranks: int, case: Case, directory: str) -> list[Contents]:
    """What was saved of each optimizer and its table, and where further steps led."""
    contents = []
    for name in OPTIMIZERS:
        table, optimizer = _make(name, case, seed=1)
        _train(table, optimizer, range(STEPS), rank, ranks, case)
        save({"model": table, "optimizer": optimizer}, checkpoint_id=Path(directory) / name)
        contents += [_contents(table, optimizer), _after_more_steps(table, optimizer, rank, ranks, case)]
    return contents


def _load_and_go_on(rank: int, ranks: int, case: Case, directory: str) -> list[Contents]:
    contents = []
    for name in OPTIMIZERS:
        table, optimizer = _make(name, case, seed=2)
        load({"model": table, "optimizer": optimizer}, Path(directory) / name)
        contents += [_contents(table, optimizer), _after_more_steps(table, optimizer, rank, ranks, case)]
    return contents


def _make(name: str, case: Case, seed: int) -> tuple[ShardedEmbedding, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    table = ShardedEmbedding(case.rows, case.dim, gradient="sum")
    if name == "DeferredAdamW":
        return table, DeferredAdamW(table)
    return table, SparseAdam(table.parameters(), bias_correction="row")


def _after_more_steps(
    table: ShardedEmbedding, optimizer: torch.optim.Optimizer, rank: int, ranks: int, case: Case
) -> Contents:
    _train(table, optimizer, range(STEPS, 2 * STEPS), rank, ranks, case)
    return _contents(table, optimizer)


def _train(
    table: ShardedEmbedding, optimizer: torch.optim.Optimizer, steps: range, rank: int, ranks: int, case: Case
) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(case.rows, (case.ids,), generator=generator) ** 2 // case.rows
        slopes = torch.randint(-64, 65, (case.ids, case.dim), generator=generator) / 64
        optimizer.zero_grad()
        (table(ids[rank::ranks]) * slopes[rank::ranks]).sum().backward()
        optimizer.step()


def _contents(table: ShardedEmbedding, optimizer: torch.optim.Optimizer) -> Contents:
    """Weights, moments and counters. All ranks call this together."""
    state: dict[str, Any] = optimizer.state_dict()["state"][0]
    rows, multiplier, offset = state["rowstep_row_order"].tolist()
    positions = (multiplier * torch.arange(rows) + offset) % rows
    found = {"weight": table.full_weight().numpy()}
    for key in sorted(state.keys() - {"rowstep_row_order"}):  # on every rank in the same order
        value = state[key]
        found[key] = np.asarray(value.full_tensor()[positions] if isinstance(value, DTensor) else value)
    return found


def _different_bytes(expected: Contents, found: Contents) -> int:
    if expected.keys() != found.keys():
        return sum(array.nbytes for array in expected.values())
    return sum(int((_as_bytes(expected[key]) != _as_bytes(found[key])).sum()) for key in expected)


def _as_bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    return np.frombuffer(array.tobytes(), dtype=np.uint8)

"""Checkpoints do not depend on the plan: whatever ranks had which tables, others go on with the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import rowstep
from rowstep import distributed
from rowstep.distributed import ShardedEmbeddingCollection
from tests.helpers.ranks import Ranks

NAMES = ("user", "item", "tags")
PLANS: dict[str, dict[str, str]] = {
    "divided": dict.fromkeys(NAMES, "divided"),
    "everywhere": dict.fromkeys(NAMES, "everywhere"),
    "mixed": {"user": "divided", "item": "everywhere", "tags": "divided"},
}
OPTIMIZERS: dict[str, Any] = {
    "SparseAdam": lambda model: rowstep.SparseAdam(model.parameters(), lr=0.05, amsgrad=True, bias_correction="row"),
    "DeferredAdamW": lambda model: rowstep.DeferredAdamW(model, lr=0.05),
    "by row": lambda model: rowstep.SparseAdam(model.parameters(), lr=0.05, second_moment="row"),
}


def plain_tables(seed: int = 0) -> nn.ModuleDict:
    torch.manual_seed(seed)
    return nn.ModuleDict(
        {
            "user": nn.Embedding(103, 4, sparse=True, dtype=torch.float64),
            "item": nn.Embedding(17, 4, padding_idx=3, sparse=True, dtype=torch.float64),
            "tags": nn.EmbeddingBag(29, 6, sparse=True, dtype=torch.float64),
        }
    )


def make(plan: str, optimizer: str, seed: int) -> tuple[Any, Any]:
    plain: Any = plain_tables(seed)
    tables = plain if plan == "plain" else ShardedEmbeddingCollection(dict(plain.items()), plan=PLANS[plan])
    return tables, OPTIMIZERS[optimizer](tables)


def train(tables: Any, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Gradients are multiples of a power of 2 and are summed exactly, however ranks divide the batch."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    plain = type(tables) is nn.ModuleDict
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        ids = {name: torch.randint(tables[name].num_embeddings, (12, 2), generator=generator) for name in NAMES}
        slopes = {name: torch.randint(-8, 9, (12,), generator=generator) / 8 for name in NAMES}
        mine = {name: each[rank::ranks] for name, each in ids.items()}
        read: Any = {name: tables[name](mine[name]) for name in NAMES} if plain else tables(mine)
        optimizer.zero_grad()
        losses = [(read[n].sum(-1).view(len(mine[n]), -1).sum(1) * slopes[n][rank::ranks]).sum() for n in NAMES]
        # The mean over ranks of a power of 2 is exact as well.
        torch.autograd.backward(torch.stack(losses).sum() * ranks)
        optimizer.step()


def contents(tables: Any) -> dict[str, Tensor]:
    """Whole tables. All ranks call this together."""
    return {
        name: getattr(tables[name], "full_weight", tables[name].weight.detach().clone)()  # of a plain one
        for name in NAMES
    }


def save(rank: int, path: Path, plan: str, optimizer_name: str) -> list[dict[str, Tensor]]:
    tables, optimizer = make(plan, optimizer_name, seed=1)
    train(tables, optimizer, range(4))
    state_dict_saver.save({"model": tables, "optimizer": optimizer}, checkpoint_id=path)
    saved = contents(tables)
    train(tables, optimizer, range(4, 8))
    return [saved, contents(tables)]


def load(rank: int, path: Path, plan: str, optimizer_name: str, reader: str = "ours") -> list[dict[str, Tensor]]:
    tables, optimizer = make(plan, optimizer_name, seed=2)
    read = distributed.load if reader == "ours" else state_dict_loader.load
    read({"model": tables, "optimizer": optimizer}, checkpoint_id=path)
    loaded = contents(tables)
    train(tables, optimizer, range(4, 8))
    return [loaded, contents(tables)]


def assert_same(found: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> None:
    for some, others in zip(found, expected, strict=True):
        for name in NAMES:
            torch.testing.assert_close(some[name], others[name], rtol=0, atol=0, msg=lambda text: f"{name}: {text}")  # noqa: B023


@pytest.mark.parametrize(
    ("saved_by", "optimizer_name"), [("divided", "DeferredAdamW"), ("mixed", "SparseAdam"), ("everywhere", "by row")]
)
def test_another_plan_goes_on_with_the_same_numbers(
    ranks: Ranks, tmp_path: Path, saved_by: str, optimizer_name: str
) -> None:
    expected = ranks.run(2, save, tmp_path, saved_by, optimizer_name)[0]
    assert not torch.equal(expected[0]["user"], expected[1]["user"])
    for count, plan in ((2, "mixed"), (2, "everywhere"), (4, "divided")):
        for found in ranks.run(count, load, tmp_path, plan, optimizer_name):
            assert_same(found, expected)
    assert_same(load(0, tmp_path, "plain", optimizer_name), expected)


def test_torch_reads_what_the_same_plan_wrote_and_what_a_plain_model_wrote(ranks: Ranks, tmp_path: Path) -> None:
    expected = ranks.run(2, save, tmp_path / "mixed", "mixed", "DeferredAdamW")[0]
    for found in ranks.run(2, load, tmp_path / "mixed", "mixed", "DeferredAdamW", "torch's"):
        assert_same(found, expected)
    with pytest.warns(UserWarning, match="assuming the intent is to save in a single process"):
        expected = save(0, tmp_path / "plain", "plain", "DeferredAdamW")
    for found in ranks.run(2, load, tmp_path / "plain", "everywhere", "DeferredAdamW", "torch's"):
        assert_same(found, expected)


def state_dicts(rank: int) -> None:
    for plan in PLANS:
        tables, optimizer = make(plan, "SparseAdam", seed=1)
        train(tables, optimizer, range(2))
        others, its = make(plan, "SparseAdam", seed=2)
        others.load_state_dict(tables.state_dict())
        its.load_state_dict(optimizer.state_dict())
        train(others, its, range(2, 4))
        expected = make(plan, "SparseAdam", seed=1)
        train(*expected, range(4))
        assert_same([contents(others)], [contents(expected[0])])

        # A plain model's state dict fits any plan, on every rank.
        plain: Any = plain_tables(5)
        others.load_state_dict(plain.state_dict())
        assert_same([contents(others)], [contents(plain)])

        # What is gathered from ranks is complete, or is not loaded.
        trained = contents(tables)
        gathered = get_model_state_dict(tables, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0 and plan == "everywhere":
            plain.load_state_dict(gathered)
            assert_same([contents(plain)], [trained])
        elif rank == 0:
            with pytest.raises(RuntimeError, match=r"Missing key|size mismatch"):
                plain.load_state_dict(gathered)


def test_state_dicts_of_any_plan(ranks: Ranks) -> None:
    ranks.run(2, state_dicts)


def fresh(rank: int) -> list[dict[str, Tensor]]:
    sizes = {"user": (5000, 3), "item": (17, 3), "tags": (29, 3)}
    found = []
    for plan in PLANS.values():
        torch.manual_seed(3)
        found.append(contents(ShardedEmbeddingCollection(sizes, plan=plan)))
    return found


def test_fresh_rows_are_the_same_for_any_plan_and_number_of_ranks(ranks: Ranks) -> None:
    torch.manual_seed(3)
    expected = contents(ShardedEmbeddingCollection({"user": (5000, 3), "item": (17, 3), "tags": (29, 3)}))
    for count in (2, 3):
        for found in ranks.run(count, fresh):
            assert_same(found, [expected] * len(PLANS))
    assert expected["user"].std() == pytest.approx(1, abs=0.05)

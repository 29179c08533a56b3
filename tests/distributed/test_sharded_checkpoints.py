"""Checkpoints of sharded tables: any number of ranks to any other, to and from models that were never sharded."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

import rowstep
from rowstep import _part, distributed
from rowstep.distributed import ShardedEmbedding, ShardedEmbeddingBag
from tests.helpers.ranks import Ranks

ROWS, WIDTH, BATCH = 103, 4, 24

OPTIMIZERS: dict[str, Any] = {
    "SparseAdam": lambda model: rowstep.SparseAdam(model.parameters(), lr=0.05),
    "SparseAdam, all state": lambda model: rowstep.SparseAdam(
        model.parameters(), lr=0.05, amsgrad=True, bias_correction="row"
    ),
    "DeferredAdamW": lambda model: rowstep.DeferredAdamW(model, lr=0.05),
    "DeferredAdamW, by row": lambda model: rowstep.DeferredAdamW(model, lr=0.05, betas=(0, 0.99), second_moment="row"),
}


class Model(nn.Module):
    """Two tables, sharded or whole, and a dense layer."""

    def __init__(self, *, sharded: bool, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        words = nn.Embedding(ROWS, WIDTH, sparse=True, dtype=torch.float64)
        bags = nn.EmbeddingBag(5, WIDTH, sparse=True, dtype=torch.float64)  # of four ranks, one has no row of it
        self.words = ShardedEmbedding.from_embedding(words) if sharded else words
        self.bags = ShardedEmbeddingBag.from_embedding(bags) if sharded else bags
        self.dense = nn.Linear(WIDTH, 1, dtype=torch.float64)

    def forward(self, ids: Tensor) -> Tensor:
        score: Tensor = self.dense(self.words(ids) + self.bags(ids.view(-1, 1) % 5))
        return score


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Steps on batches that depend on nothing but the step, cut among the ranks there are."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    for step in steps:
        ids = torch.randint(ROWS, (BATCH,), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        torch.autograd.backward(model(ids[rank::ranks]).sin().sum() * ranks / BATCH)
        if ranks > 1 and not isinstance(model, nn.parallel.DistributedDataParallel):
            for name, param in model.named_parameters():
                if name.startswith("dense") and param.grad is not None:
                    dist.all_reduce(param.grad)
                    param.grad /= ranks
        optimizer.step()


Contents = dict[str, Any]


def contents(model: Model, optimizer: torch.optim.Optimizer) -> Contents:
    """Everything that a checkpoint must bring back, of the whole tables, by id. All ranks call this together."""
    saved = optimizer.state_dict()["state"]
    found: Contents = {}
    for number, (name, param) in enumerate(model.named_parameters()):
        shard = _part.part_of(param)
        for key, value in {"weight": param.detach(), **optimizer.state[param]}.items():
            is_by_row = isinstance(value, Tensor) and value.dim()
            if shard is not None and is_by_row:
                whole = shard.as_global(value)
                whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
                value = whole.reshape(-1, *value.shape[1:])[shard.order.positions(torch.arange(len(whole)))]
            found[f"{name} {key}"] = value.clone() if isinstance(value, Tensor) and value.dim() else float(value)
        assert set(saved[number]) - {"rowstep_row_order"} == set(optimizer.state[param])
    return found


def assert_same(found: Contents, expected: Contents, tolerance: float = 0.0) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, Tensor):
            torch.testing.assert_close({key: found[key]}, {key: value}, rtol=0, atol=tolerance)
        else:
            assert found[key] == value, key


def save(rank: int, path: Path, name: str) -> tuple[Contents, Contents]:
    model = Model(sharded=True)
    optimizer = OPTIMIZERS[name](model)
    train(model, optimizer, range(6))
    state_dict_saver.save({"model": model, "optimizer": optimizer}, checkpoint_id=path)
    saved = contents(model, optimizer)
    train(model, optimizer, range(6, 12))
    return saved, contents(model, optimizer)


def load_and_go_on(rank: int, path: Path, name: str, load: str) -> tuple[Contents, Contents]:
    model = Model(sharded=True, seed=1)
    optimizer = OPTIMIZERS[name](model)
    into = {"model": model, "optimizer": optimizer}
    if load == "torch's load":
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
            state_dict_loader.load(into, checkpoint_id=path)
    else:
        distributed.load(into, path)
    loaded = contents(model, optimizer)
    train(model, optimizer, range(6, 12))
    return loaded, contents(model, optimizer)


@pytest.mark.parametrize("name", list(OPTIMIZERS))
@pytest.mark.parametrize("load", ["torch's load", "our load"])
def test_two_ranks_save_and_any_number_loads_the_same_bits(ranks: Ranks, tmp_path: Path, name: str, load: str) -> None:
    path = tmp_path / "checkpoint"
    saved, later = ranks.run(2, save, path, name)[0]
    for count in (3, 1, 4):
        for loaded, afterwards in ranks.run(count, load_and_go_on, path, name, load):
            assert_same(loaded, saved)
            assert_same(afterwards, later, tolerance=1e-12)  # the sums over a batch come in another order
    for loaded, afterwards in ranks.run(2, load_and_go_on, path, name, load):
        assert_same(loaded, saved)
        assert_same(afterwards, later)
    loaded, afterwards = load_and_go_on(0, path, name, load)  # a single process without a group
    assert_same(loaded, saved)
    assert_same(afterwards, later, tolerance=1e-12)


def train_whole(name: str) -> tuple[Model, torch.optim.Optimizer, Contents]:
    model = Model(sharded=False)
    optimizer = {
        "torch.optim.AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.05),
        **OPTIMIZERS,
    }[name](model)
    if name == "torch.optim.AdamW":
        model.words.sparse = model.bags.sparse = False
    train(model, optimizer, range(6))
    return model, optimizer, contents(model, optimizer)


@pytest.mark.parametrize(
    ("written_by", "name"),
    [
        ("SparseAdam", "SparseAdam"),
        ("SparseAdam, all state", "SparseAdam, all state"),
        ("SparseAdam, all state", "SparseAdam"),  # options come from the checkpoint, and their state with them
        ("DeferredAdamW", "DeferredAdamW"),
        ("torch.optim.AdamW", "DeferredAdamW"),
        ("DeferredAdamW, by row", "DeferredAdamW, by row"),
    ],
)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
def test_a_checkpoint_of_whole_tables_loads_into_sharded_ones_and_back(
    ranks: Ranks, tmp_path: Path, written_by: str, name: str
) -> None:
    model, optimizer, expected = train_whole(written_by)
    path = tmp_path / "whole"
    state_dict_saver.save({"model": model, "optimizer": optimizer}, checkpoint_id=path)
    for count in (3, 1):
        for loaded, _ in ranks.run(count, load_and_go_on, path, name, "our load"):
            assert_same(loaded, expected)
    assert_same(load_and_go_on(0, path, name, "our load")[0], expected)

    path = tmp_path / "sharded"
    sharded = ranks.run(3, save, path, name)[0][0]
    whole = Model(sharded=False, seed=1)
    back = OPTIMIZERS[name](whole)
    distributed.load({"model": whole, "optimizer": back}, path)
    assert_same(contents(whole, back), sharded)


def load_plain_state_dicts(rank: int, model_state: Contents, optimizer_state: Contents, name: str) -> Contents:
    model = Model(sharded=True, seed=1)
    optimizer = OPTIMIZERS[name](model)
    model.load_state_dict(model_state)
    optimizer.load_state_dict(optimizer_state)
    return contents(model, optimizer)


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_state_dicts_of_whole_tables_load_without_a_checkpoint(ranks: Ranks, name: str) -> None:
    model, optimizer, expected = train_whole(name)
    for found in ranks.run(2, load_plain_state_dicts, model.state_dict(), optimizer.state_dict(), name):
        assert_same(found, expected)
    alone = Model(sharded=True, seed=1)
    its_optimizer = OPTIMIZERS[name](alone)
    alone.load_state_dict(model.state_dict())
    its_optimizer.load_state_dict(optimizer.state_dict())
    assert_same(contents(alone, its_optimizer), expected)

    again = Model(sharded=False, seed=2)
    its = OPTIMIZERS[name](again)
    its.load_state_dict(its_optimizer.state_dict())  # rows lie in another order there, and are put back in that of ids
    for key, slot in optimizer.state[model.words.weight].items():
        assert torch.equal(torch.as_tensor(its.state[again.words.weight][key]), torch.as_tensor(slot))


def save_by_name(rank: int, path: Path, name: str) -> Contents:
    model = Model(sharded=True)
    wrapped = distributed.ddp(model)
    optimizer = OPTIMIZERS[name](model)
    train(wrapped, optimizer, range(6))
    model_state, optimizer_state = get_state_dict(wrapped, optimizer)
    state_dict_saver.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
    return contents(model, optimizer)


def load_by_name(rank: int, path: Path, name: str) -> tuple[Contents, Contents]:
    model = Model(sharded=True, seed=1)
    wrapped = distributed.ddp(model) if dist.is_initialized() else model
    optimizer = OPTIMIZERS[name](model)
    model_state, optimizer_state = get_state_dict(wrapped, optimizer)
    state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
    distributed.load(state, path)
    set_state_dict(wrapped, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    gathered, _ = get_state_dict(wrapped, optimizer, options=StateDictOptions(full_state_dict=True))
    return contents(model, optimizer), dict(gathered)


@pytest.mark.parametrize("name", ["SparseAdam", "DeferredAdamW"])
def test_torch_s_state_dicts_by_name_work_through_ddp(ranks: Ranks, tmp_path: Path, name: str) -> None:
    path = tmp_path / "checkpoint"
    saved = ranks.run(2, save_by_name, path, name)[0]
    for found, gathered in [*ranks.run(3, load_by_name, path, name), load_by_name(0, path, name)]:
        assert_same(found, saved)
        assert gathered["words.weight"].shape == (ROWS, WIDTH, 1)
        assert not isinstance(gathered["words.weight"], DTensor)


def save_asynchronously(rank: int, path: Path, name: str) -> Contents:
    model = Model(sharded=True)
    optimizer = OPTIMIZERS[name](model)
    train(model, optimizer, range(6))
    saved = contents(model, optimizer)
    own = dist.new_group(backend="gloo")  # the checkpoint's collectives run beside those of the training
    writing: Any = state_dict_saver.async_save(
        {"model": model, "optimizer": optimizer}, checkpoint_id=path, process_group=own
    )
    train(model, optimizer, range(6, 12))
    writing.result()
    return saved


@pytest.mark.parametrize("name", ["SparseAdam", "DeferredAdamW"])
def test_training_goes_on_while_a_checkpoint_is_written(ranks: Ranks, tmp_path: Path, name: str) -> None:
    path = tmp_path / "checkpoint"
    saved = ranks.run(2, save_asynchronously, path, name)[0]
    for loaded, _ in ranks.run(3, load_and_go_on, path, name, "our load"):
        assert_same(loaded, saved)


def look_at_state_dicts(rank: int) -> None:
    model = Model(sharded=True)
    optimizer = OPTIMIZERS["SparseAdam, all state"](model)
    weight = model.state_dict()["words.weight"]
    assert isinstance(weight, DTensor)
    assert weight.shape == (ROWS, WIDTH, 1)
    assert weight.to_local().data_ptr() == model.words.weight.data_ptr()
    state = optimizer.state_dict()["state"][0]
    assert set(state) == {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "row_step", "rowstep_row_order"}
    assert state["row_step"].shape == (ROWS, 1, 1)
    for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "row_step"):
        assert state[key].to_local().data_ptr() == optimizer.state[model.words.weight][key].data_ptr()
    assert set(optimizer.state_dict()["state"]) == set(range(4))


def test_state_dicts_are_views_and_complete_before_the_first_step(ranks: Ranks) -> None:
    ranks.run(3, look_at_state_dicts)


def load_into_another_size(rank: int, path: Path) -> list[str]:
    model = ShardedEmbedding(ROWS + 1, WIDTH)
    errors = []
    for load in (distributed.load, state_dict_loader.load):
        try:
            load({"words": model.state_dict()}, checkpoint_id=path)
        except CheckpointException as error:  # torch makes one of what all ranks have met
            errors.append(str(error))
    return errors


def save_one_table(rank: int, path: Path, whole: bool) -> None:
    table = nn.Embedding(ROWS, WIDTH) if whole else ShardedEmbedding(ROWS, WIDTH)
    state_dict_saver.save({"words": table.state_dict()}, checkpoint_id=path)


@pytest.mark.parametrize("whole", [False, True])
def test_a_table_of_another_size_is_refused_on_every_rank(ranks: Ranks, tmp_path: Path, whole: bool) -> None:
    ranks.run(2, save_one_table, tmp_path, whole)
    for errors in ranks.run(2, load_into_another_size, tmp_path):
        assert len(errors) == 2
        assert str(ROWS) in errors[0]
    model = ShardedEmbedding(ROWS + 1, WIDTH)
    with pytest.raises(ValueError, match="expected all 104 rows of the table"):
        model.load_state_dict(nn.Embedding(ROWS, WIDTH).state_dict())


def test_a_checkpoint_has_to_be_named() -> None:
    with pytest.raises(ValueError, match="neither checkpoint_id nor storage_reader was given"):
        distributed.load({})

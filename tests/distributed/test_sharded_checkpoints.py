"""Checkpoints of sharded tables: whatever ranks had which rows, any others go on with the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

import rowstep
from rowstep import distributed
from rowstep._layout import RowOrder
from rowstep.distributed import ShardedEmbedding, ShardedEmbeddingCollection
from tests.helpers.ranks import Ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")

ROWS, WIDTH = 103, 4
SIZES = {"user": ROWS, "item": 17, "tags": 5}
NAMES = tuple(SIZES)
PLANS: dict[str, dict[str, str]] = {
    "divided": dict.fromkeys(NAMES, "divided"),
    "everywhere": dict.fromkeys(NAMES, "everywhere"),
    "mixed": {"user": "divided", "item": "everywhere", "tags": "divided"},
}
OPTIMIZERS: dict[str, Any] = {
    "SparseAdam": lambda model: rowstep.SparseAdam(model.parameters()),
    "all state": lambda model: rowstep.SparseAdam(model.parameters(), lr=0.05, amsgrad=True, bias_correction="row"),
    "DeferredAdamW": lambda model: rowstep.DeferredAdamW(model, lr=0.05),
    "by row": lambda model: rowstep.DeferredAdamW(model, lr=0.05, betas=(0, 0.99), second_moment="row"),
    "torch.optim.AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.05),
}

Contents = dict[str, Tensor]


def plain_tables(seed: int = 0, sparse: bool = True) -> nn.ModuleDict:
    torch.manual_seed(seed)
    return nn.ModuleDict(
        {
            "user": nn.Embedding(ROWS, WIDTH, sparse=sparse, dtype=torch.float64),
            "item": nn.Embedding(SIZES["item"], WIDTH, padding_idx=3, sparse=sparse, dtype=torch.float64),
            "tags": nn.EmbeddingBag(SIZES["tags"], 6, sparse=sparse, dtype=torch.float64),  # a rank of four has none
        }
    )


def make(plan: str, optimizer: str, seed: int) -> tuple[Any, Any]:
    plain: Any = plain_tables(seed, sparse=optimizer != "torch.optim.AdamW")
    tables = plain if plan == "plain" else ShardedEmbeddingCollection(dict(plain.items()), plan=PLANS[plan])
    return tables, OPTIMIZERS[optimizer](tables)


def train(tables: Any, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Gradients are multiples of a power of 2 and are summed exactly, however ranks divide the batch."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        ids = {name: torch.randint(rows, (12, 2), generator=generator) for name, rows in SIZES.items()}
        slopes = {name: torch.randint(-8, 9, (12,), generator=generator) / 8 for name in NAMES}
        mine = {name: each[rank::ranks] for name, each in ids.items()}
        read: Any = tables(mine) if hasattr(tables, "plan") else {name: tables[name](mine[name]) for name in NAMES}
        optimizer.zero_grad()
        losses = [(read[n].sum(-1).view(len(mine[n]), -1).sum(1) * slopes[n][rank::ranks]).sum() for n in NAMES]
        # The mean over ranks of a power of 2 is exact as well.
        torch.autograd.backward(torch.stack(losses).sum() * ranks)
        optimizer.step()


def contents(tables: Any) -> Contents:
    """Whole tables. All ranks call this together."""
    return {name: getattr(tables[name], "full_weight", tables[name].weight.detach().clone)() for name in NAMES}


def save(rank: int, path: Path, plan: str, optimizer_name: str) -> list[Contents]:
    tables, optimizer = make(plan, optimizer_name, seed=1)
    train(tables, optimizer, range(4))
    state_dict_saver.save({"model": tables, "optimizer": optimizer}, checkpoint_id=path)
    saved = contents(tables)
    train(tables, optimizer, range(4, 8))
    return [saved, contents(tables)]


def load(rank: int, path: Path, plan: str, optimizer_name: str, reader: str = "ours") -> list[Contents]:
    tables, optimizer = make(plan, optimizer_name, seed=2)
    read = distributed.load if reader == "ours" else state_dict_loader.load
    read({"model": tables, "optimizer": optimizer}, checkpoint_id=path)
    loaded = contents(tables)
    train(tables, optimizer, range(4, 8))
    return [loaded, contents(tables)]


def assert_same(found: list[Contents], expected: list[Contents], atol: float = 0) -> None:
    for some, others in zip(found, expected, strict=True):
        torch.testing.assert_close(some, others, rtol=0, atol=atol)


@pytest.mark.parametrize(
    ("plan", "written_by", "name"),
    [
        ("divided", "DeferredAdamW", "DeferredAdamW"),
        ("mixed", "all state", "SparseAdam"),  # options come from the checkpoint, and their state with them
        ("everywhere", "by row", "by row"),
        ("plain", "all state", "SparseAdam"),
        ("plain", "SparseAdam", "all state"),
        ("plain", "torch.optim.AdamW", "DeferredAdamW"),
    ],
)
def test_any_plan_on_any_number_of_ranks_goes_on_with_the_same_bits(
    ranks: Ranks, tmp_path: Path, plan: str, written_by: str, name: str
) -> None:
    arguments = (tmp_path, plan, written_by)
    expected = save(0, *arguments) if plan == "plain" else ranks.run(2, save, *arguments)[0]
    assert not torch.equal(expected[0]["user"], expected[1]["user"])
    atol = 1e-12 if written_by == "torch.optim.AdamW" else 0  # deferred rows take several of its steps at once
    for count, other in ((2, "mixed"), (4, "divided")):
        for found in ranks.run(count, load, tmp_path, other, name):
            assert_same(found, expected, atol)
    assert_same(load(0, tmp_path, "plain", name), expected, atol)


def test_torch_reads_what_the_same_plan_wrote_and_what_a_plain_model_wrote(ranks: Ranks, tmp_path: Path) -> None:
    expected = ranks.run(2, save, tmp_path / "mixed", "mixed", "all state")[0]
    for count in (2, 4):
        for found in ranks.run(count, load, tmp_path / "mixed", "mixed", "all state", "torch's"):
            assert_same(found, expected)
    assert_same(load(0, tmp_path / "mixed", "mixed", "all state", "torch's"), expected)
    expected = save(0, tmp_path / "plain", "plain", "DeferredAdamW")
    for found in ranks.run(2, load, tmp_path / "plain", "everywhere", "DeferredAdamW", "torch's"):
        assert_same(found, expected)


def state_dicts(rank: int) -> None:
    for plan in PLANS:
        tables, optimizer = make(plan, "all state", seed=1)
        train(tables, optimizer, range(2))
        others, its = make(plan, "all state", seed=2)
        others.load_state_dict(tables.state_dict())
        its.load_state_dict(optimizer.state_dict())
        train(others, its, range(2, 4))
        expected = make(plan, "all state", seed=1)
        train(*expected, range(4))
        assert_same([contents(others)], [contents(expected[0])])

        # A plain model's state dict fits any plan, and what is everywhere is saved as a plain model's.
        plain: Any = plain_tables(5)
        others.load_state_dict(plain.state_dict())
        assert_same([contents(others)], [contents(plain)])
        if plan == "everywhere":
            plain.load_state_dict(get_model_state_dict(tables, options=StateDictOptions(full_state_dict=True)))
            assert_same([contents(plain)], [contents(tables)])

    # They are views, and complete before the first step.
    tables, optimizer = make("divided", "all state", seed=1)
    weight, state = tables.state_dict()["user.weight"], optimizer.state_dict()["state"][0]
    assert isinstance(weight, DTensor)
    assert weight.shape == (ROWS, WIDTH, 1)
    assert weight.to_local().data_ptr() == tables["user"].weight.data_ptr()
    assert set(state) == {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "row_step", "rowstep_row_order"}
    assert state["row_step"].shape == (ROWS, 1, 1)
    for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "row_step"):
        assert state[key].to_local().data_ptr() == optimizer.state[tables["user"].weight][key].data_ptr()


def test_state_dicts_of_any_plan(ranks: Ranks) -> None:
    ranks.run(2, state_dicts)


def fresh(rank: int) -> list[Contents]:
    found = []
    for plan in (*PLANS.values(), {}):
        torch.manual_seed(3)
        sizes = {"user": (5000, 3), "item": (17, 3), "tags": (29, 3)}
        found.append(contents(ShardedEmbeddingCollection(sizes, plan=plan)))
    return found


def test_fresh_rows_are_the_same_for_any_plan_and_number_of_ranks(ranks: Ranks) -> None:
    expected = fresh(0)
    assert_same(expected, expected[:1] * len(expected))
    for found in ranks.run(3, fresh):
        assert_same(found, expected)
    rows = expected[0]["user"]  # chunks are drawn from seeds of their own: none is another's copy
    assert len(torch.unique(rows)) > 14_900
    assert rows.std() == pytest.approx(1, abs=0.05)


def model_of(seed: int) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(ShardedEmbedding(ROWS, WIDTH), nn.Linear(WIDTH, 1))


def whole(model: Any, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    moment = optimizer.state_dict()["state"][0]["exp_avg"]
    return [model[0].full_weight(), moment.full_tensor() if isinstance(moment, DTensor) else moment]


def save_by_name(rank: int, path: Path) -> list[Tensor]:
    """Through ddp, and while the training goes on."""
    model = model_of(seed=0)
    wrapped, optimizer = distributed.ddp(model), rowstep.DeferredAdamW(model)
    own = dist.new_group(backend="gloo")  # the checkpoint's collectives run beside those of the training
    for step in range(6):
        optimizer.zero_grad()
        torch.autograd.backward(wrapped(torch.arange(step, 50, 2 + rank)).sin().sum())
        optimizer.step()
        if step == 2:
            saved = whole(model, optimizer)
            model_state, optimizer_state = get_state_dict(wrapped, optimizer)
            state = {"model": model_state, "optimizer": optimizer_state}
            writing: Any = state_dict_saver.async_save(state, checkpoint_id=path, process_group=own)
    writing.result()
    assert not torch.equal(saved[0], model[0].full_weight())
    return saved


def load_by_name(rank: int, path: Path) -> tuple[list[Tensor], dict[str, Any]]:
    model = model_of(seed=1)
    wrapped = distributed.ddp(model) if dist.is_initialized() else model
    optimizer = rowstep.DeferredAdamW(model)
    model_state, optimizer_state = get_state_dict(wrapped, optimizer)
    state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
    distributed.load(state, path)
    set_state_dict(wrapped, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    gathered, _ = get_state_dict(wrapped, optimizer, options=StateDictOptions(full_state_dict=True))
    return whole(model, optimizer), dict(gathered)


def test_torch_s_state_dicts_by_name_are_written_through_ddp_while_training_goes_on(
    ranks: Ranks, tmp_path: Path
) -> None:
    saved = ranks.run(2, save_by_name, tmp_path)[0]
    for found, gathered in [*ranks.run(3, load_by_name, tmp_path), load_by_name(0, tmp_path)]:
        assert all(torch.equal(some, other) for some, other in zip(found, saved, strict=True))
        assert gathered["0.weight"].shape == (ROWS, WIDTH, 1)
        assert not isinstance(gathered["0.weight"], DTensor)


def load_mixed(rank: int, path: Path, momentum: float) -> None:
    """Tables of every kind: divided and everywhere in a collection, and a plain one under ddp."""

    def made() -> tuple[Any, Any]:
        tables = ShardedEmbeddingCollection({"divided": (ROWS, WIDTH), "everywhere": (17, WIDTH)})
        model = nn.ModuleDict({"tables": tables, "plain": distributed.ddp(nn.Embedding(7, WIDTH, sparse=True))})
        return model, rowstep.DeferredAdamW(model, second_moment="row", betas=(momentum, 0.99))

    (model, optimizer), ids = made(), torch.tensor([rank, 5])
    read = model["tables"]({"divided": ids, "everywhere": ids}) | {"plain": model["plain"](ids)}
    torch.autograd.backward([each.sum() for each in read.values()])
    optimizer.step()
    state_dict_saver.save({"optimizer": optimizer}, checkpoint_id=path)
    full, flat = "full_state_dict", "flatten_optimizer_state_dict"
    for way in ("dcp.load", "", full, flat, f"{full} broadcast_from_rank0"):
        other, its = made()
        if way == "dcp.load":
            state_dict_loader.load({"optimizer": its}, checkpoint_id=path)
        else:
            options: Any = StateDictOptions(**dict.fromkeys(way.split(), True))  # type: ignore[arg-type]
            saved = get_optimizer_state_dict(model, optimizer, options=options)
            set_optimizer_state_dict(other, its, {} if rank and "rank0" in way else saved, options=options)
        for param, own in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(dict(its.state[own]), dict(optimizer.state[param]), rtol=0, atol=0)


@pytest.mark.parametrize("momentum", [0.9, 0])
def test_torch_loads_the_state_of_replicated_tables_beside_sharded_ones(
    ranks: Ranks, tmp_path: Path, momentum: float
) -> None:
    ranks.run(2, load_mixed, tmp_path, momentum)


def another_size(rank: int, path: Path) -> None:
    state_dict_saver.save({"words": ShardedEmbedding(ROWS, WIDTH).state_dict()}, checkpoint_id=path)
    other = ShardedEmbedding(ROWS + 1, WIDTH)
    for read in (distributed.load, state_dict_loader.load):
        with pytest.raises(CheckpointException, match=str(ROWS)):  # torch makes one of what all ranks have met
            read({"words": other.state_dict()}, checkpoint_id=path)
    with pytest.raises(ValueError, match="expected all 104 rows of the table"):
        other.load_state_dict(nn.Embedding(ROWS, WIDTH).state_dict())
    with pytest.raises(CheckpointException, match=r"Missing key in checkpoint state_dict: other\.weight"):
        distributed.load({"other": other.state_dict()}, path)
    with pytest.raises(ValueError, match="neither checkpoint_id nor storage_reader was given"):
        distributed.load({})


# State dicts on unusual ways


def whole_moments(optimizer: rowstep.SparseAdam) -> Any:
    return optimizer.state_dict()["state"][0]["exp_avg"].full_tensor().squeeze(-1)


def unusual_state_dicts(rank: int, path: Path) -> None:
    model = model_of(seed=0)[:1]
    optimizer = rowstep.SparseAdam(model.parameters(), lr=0.1)
    torch.autograd.backward(model(torch.arange(5) + rank).square().sum())
    optimizer.step()
    weights, moments = model[0].full_weight(), whole_moments(optimizer)

    # Gathered tensors must not stay in memory for the sake of one rank's rows.
    its = rowstep.SparseAdam(model_of(seed=0)[:1].parameters())
    gathered = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))[1]
    its.load_state_dict({**its.state_dict(), "state": {0: cast(Any, gathered)["state"]["0.weight"]}})
    (state,) = its.state.values()
    assert state["exp_avg"].untyped_storage().nbytes() == state["exp_avg"].nbytes

    # A checkpoint from another order, which torch loads into the optimizer before it loads the model.
    shard = model[0]._shard
    now, shard.order = shard.order, RowOrder(ROWS, 3, 2)
    mine = shard.order.ids(torch.arange(shard.positions.start, shard.positions.stop))
    by_id = moments[now.positions(torch.arange(ROWS))]
    with torch.no_grad():
        model[0].weight.copy_(weights[mine])
        optimizer.state[model[0].weight]["exp_avg"].copy_(by_id[mine])
    state_dict_saver.save({"a_optimizer": optimizer, "b_model": model}, checkpoint_id=path / "older")
    for read in (state_dict_loader.load, distributed.load):
        other = model_of(seed=0)[:1]
        its = rowstep.SparseAdam(other.parameters())
        read({"a_optimizer": its, "b_model": other}, checkpoint_id=path / "older")
        assert torch.equal(other[0].full_weight(), weights)
        assert torch.equal(whole_moments(its)[now.positions(torch.arange(ROWS))], by_id)


def test_a_tensor_that_is_as_long_as_the_table_need_not_be_one_of_rows() -> None:
    table, whole = ShardedEmbedding(ROWS, WIDTH), nn.Embedding(ROWS, WIDTH)
    optimizer, its = rowstep.SparseAdam(table.parameters()), rowstep.SparseAdam(whole.parameters())
    optimizer.state[table.weight]["note"] = torch.arange(ROWS)
    its.load_state_dict(optimizer.state_dict())
    assert torch.equal(its.state[whole.weight]["note"], torch.arange(ROWS))


def load_on_some_ranks(rank: int, path: Path) -> None:
    """Whoever is not named waits for nobody, and nobody for it."""
    pair = dist.new_group([0, 1])
    if rank < 2:
        table = ShardedEmbedding(ROWS, WIDTH, group=pair)
        state_dict_saver.save({"table": table.state_dict()}, checkpoint_id=path, process_group=pair)
        other = ShardedEmbedding(ROWS, WIDTH, group=pair)
        distributed.load({"table": other.state_dict()}, path, process_group=pair)
        assert torch.equal(other.weight, table.weight)
        whole = table.full_weight()
        if rank == 0:
            plain, beside = nn.Embedding(ROWS, WIDTH), nn.Embedding(ROWS, WIDTH)
            before = beside.weight.detach().clone()
            reader = FileSystemReader(path / "nowhere")  # and then it is told to read elsewhere
            into = {"table": plain.state_dict(), "other": beside.state_dict()}
            distributed.load(into, path, storage_reader=reader, no_dist=True, allow_partial_load=True)
            assert torch.equal(plain.weight, whole)
            assert torch.equal(beside.weight, before)


def truncated(rank: int, path: Path) -> None:
    """A rank that cannot read all of its part leaves both with what they had; then they load into the same."""
    expected = save(rank, path, "mixed", "DeferredAdamW")
    file = path / "__0_0.distcp"  # the other has the orders of rows, which are read first
    whole = file.read_bytes()
    for steps in (range(0), range(2)):
        (tables, optimizer), (others, its) = (make("mixed", "DeferredAdamW", seed=2) for _ in range(2))
        train(tables, optimizer, steps)
        train(others, its, steps)
        its.flush()
        state: dict[str, Any] = {"model": tables.state_dict(), "optimizer": optimizer.state_dict()}
        dist.barrier()
        file.write_bytes(whole[:-2000])
        for into in (state, {"model": tables, "optimizer": optimizer}):
            with pytest.raises(CheckpointException):
                distributed.load(into, path)
        train(tables, optimizer, range(2, 4))
        train(others, its, range(2, 4))
        assert_same([contents(tables)], [contents(others)])
        file.write_bytes(whole)
        distributed.load({"model": tables, "optimizer": optimizer}, path)
        loaded = contents(tables)
        train(tables, optimizer, range(4, 8))
        assert_same([loaded, contents(tables)], expected)


@pytest.mark.parametrize(
    ("count", "program"), [(2, another_size), (2, unusual_state_dicts), (3, load_on_some_ranks), (2, truncated)]
)
def test_rows_arrive_in_order_or_are_refused(ranks: Ranks, tmp_path: Path, count: int, program: Any) -> None:
    ranks.run(count, program, tmp_path)

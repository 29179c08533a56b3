"""What goes wrong in distributed code without a word: here it is refused, or it is right after all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.parallel import DistributedDataParallel

import rowstep
from rowstep._layout import RowOrder
from rowstep._part import ROW_ORDER, part_of
from rowstep.distributed import ShardedEmbedding, ddp, load
from tests.helpers.ranks import Ranks

ROWS, WIDTH = 11, 4


def message_of(error: type[Exception], action: Callable[[], Any]) -> str:
    try:
        action()
    except error as raised:
        return str(raised)
    raise AssertionError(f"{error.__name__} was not raised")


def model_of(*layers: nn.Module) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(ShardedEmbedding(ROWS, WIDTH), *layers)


def trained(model: nn.Module, ids: Tensor) -> rowstep.SparseAdam:
    optimizer = rowstep.SparseAdam(model.parameters(), lr=0.1)
    torch.autograd.backward(model(ids).square().sum())
    optimizer.step()
    return optimizer


# Ranks that skip steps


def scale_with_an_overflow(rank: int) -> tuple[float, float, Tensor]:
    model = model_of(nn.Linear(WIDTH, 1))
    with torch.no_grad():
        model[1].weight.fill_(
            1e34
        )  # the table's gradient overflows, on the rank that owns the row; the layer's does not
    parallel, optimizer = ddp(model), rowstep.SparseAdam(model.parameters(), lr=0.1)
    scaler = ShardedGradScaler("cpu", init_scale=2.0**16)
    for _ in range(3):
        optimizer.zero_grad()
        torch.autograd.backward(scaler.scale(parallel(torch.tensor([0])).sum()))
        scaler.step(optimizer)
        scaler.update()
    return scaler.get_scale(), float(optimizer.state[model[0].weight]["step"]), model[1].bias.detach()


def test_ranks_skip_the_same_steps_under_torchs_sharded_scaler(ranks: Ranks) -> None:
    first, second = ranks.run(2, scale_with_an_overflow)
    assert first == second
    assert first[0] < 2.0**16


# Wrappers and groups


def wrap_wrongly(rank: int) -> None:
    wrapped = DistributedDataParallel(nn.Sequential(ShardedEmbedding(10, WIDTH), nn.Linear(WIDTH, 1)))
    assert "use rowstep.distributed.ddp" in message_of(RuntimeError, lambda: wrapped(torch.arange(3)))

    model = model_of(nn.Linear(WIDTH, 1))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["1.bias"])  # type: ignore[no-untyped-call]
    assert ddp(model).parameters_to_ignore == {"0.weight", f"0.{ROW_ORDER}", "1.bias"}

    group = dist.new_group([0])
    if rank == 1:
        assert "not in the process group" in message_of(ValueError, lambda: ShardedEmbedding(ROWS, WIDTH, group=group))


def test_wrong_wrappers_and_groups_are_refused(ranks: Ranks) -> None:
    ranks.run(2, wrap_wrongly)


# Parameters that become other Parameters


def test_a_weight_stays_a_part_of_its_table_whatever_becomes_of_it() -> None:
    table = ShardedEmbedding(ROWS, WIDTH, device="meta").to_empty(device="cpu")
    assert part_of(table.weight) is not None
    table.weight = nn.Parameter(torch.zeros(ROWS, WIDTH))
    assert part_of(table.weight) is not None
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        table.double()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    assert table.weight.dtype == torch.float64
    assert part_of(table.weight) is not None
    table.load_state_dict(nn.Embedding(ROWS, WIDTH, dtype=torch.float64).state_dict(), assign=True)
    assert part_of(table.weight) is not None


def test_what_is_frozen_has_no_state_and_what_was_not_loaded_has_one() -> None:
    model = nn.Sequential(ShardedEmbedding(ROWS, WIDTH, _freeze=True), ShardedEmbedding(ROWS, WIDTH))
    optimizer = rowstep.SparseAdam(model.parameters())
    assert list(optimizer.state_dict()["state"]) == [1]
    optimizer.load_state_dict(rowstep.SparseAdam(nn.Linear(2, 2).parameters()).state_dict())
    assert set(optimizer.state_dict()["state"][1]) == {"step", "exp_avg", "exp_avg_sq", ROW_ORDER}


# State dicts on unusual ways


def whole_moments(optimizer: rowstep.SparseAdam) -> Tensor:
    full: Tensor = optimizer.state_dict()["state"][0]["exp_avg"].full_tensor()
    return full.squeeze(-1)


def unusual_state_dicts(rank: int, path: Path) -> None:
    model = model_of()
    optimizer = trained(model, torch.arange(5) + rank)
    weights, moments = model[0].full_weight(), whole_moments(optimizer)

    # Some programs keep parameters only.
    other = model_of()
    its = rowstep.SparseAdam(other.parameters())
    other.load_state_dict({"0.weight": model.state_dict()["0.weight"]})
    assert torch.equal(other[0].full_weight(), weights)

    # Gathered tensors must not stay in memory for the sake of one rank's rows.
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
    for read in (state_dict_loader.load, load):
        other = model_of()
        its = rowstep.SparseAdam(other.parameters())
        read({"a_optimizer": its, "b_model": other}, checkpoint_id=path / "older")
        assert torch.equal(other[0].full_weight(), weights)
        assert torch.equal(whole_moments(its)[now.positions(torch.arange(ROWS))], by_id)


def test_state_dicts_arrive_in_order_on_unusual_ways(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, unusual_state_dicts, tmp_path)


def test_a_tensor_that_is_as_long_as_the_table_need_not_be_one_of_rows() -> None:
    table, whole = ShardedEmbedding(ROWS, WIDTH), nn.Embedding(ROWS, WIDTH)
    optimizer, its = trained(table, torch.arange(5)), rowstep.SparseAdam(whole.parameters())
    optimizer.state[table.weight]["note"] = torch.arange(ROWS)
    its.load_state_dict(optimizer.state_dict())
    assert torch.equal(its.state[whole.weight]["note"], torch.arange(ROWS))
    moments = optimizer.state[table.weight]["exp_avg"]
    assert torch.equal(its.state[whole.weight]["exp_avg"], moments[table.local_rows(torch.arange(ROWS))])


def load_on_some_ranks(rank: int, path: Path) -> None:
    """Whoever is not named waits for nobody, and nobody for it."""
    pair = dist.new_group([0, 1])
    if rank < 2:
        table = ShardedEmbedding(ROWS, WIDTH, group=pair)
        state_dict_saver.save({"table": table.state_dict()}, checkpoint_id=path, process_group=pair)
        other = ShardedEmbedding(ROWS, WIDTH, group=pair)
        load({"table": other.state_dict()}, path, process_group=pair)
        assert torch.equal(other.weight, table.weight)
        whole = table.full_weight()
        if rank == 0:
            plain, beside = nn.Embedding(ROWS, WIDTH), nn.Embedding(ROWS, WIDTH)
            before = beside.weight.detach().clone()
            reader = FileSystemReader(path / "nowhere")  # and then it is told to read elsewhere
            into = {"table": plain.state_dict(), "other": beside.state_dict()}
            load(into, path, storage_reader=reader, no_dist=True, allow_partial_load=True)
            assert torch.equal(plain.weight, whole)
            assert torch.equal(beside.weight, before)


def test_some_ranks_or_one_can_load_alone(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(3, load_on_some_ranks, tmp_path)

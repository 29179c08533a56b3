"""Every way from a sharded table to a plain one and back, by our loaders and torch's: the right rows, or an error.

Rows of a sharded table lie in an order of their own. In state dicts its tensors have another shape than a plain
model's, so torch's loaders cannot take the one for the other.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import rowstep
from rowstep import distributed
from rowstep._layout import RowOrder
from rowstep._part import ROW_ORDER, part_of
from rowstep.distributed import ShardedEmbedding
from tests.helpers.copies import through_a_file
from tests.helpers.ranks import Ranks

FULL = StateDictOptions(full_state_dict=True)
LOOSE = StateDictOptions(full_state_dict=True, strict=False)
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
FROM_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)

Kind = dict[str, Any]
ELEMENT: Kind = {"bias_correction": "row", "amsgrad": True}
ROW: Kind = {"second_moment": "row", "betas": (0.0, 0.99), "bias_correction": "row"}


class Side:
    """A model of one table and its optimizer, sharded or plain, with numbers that tell their ids."""

    def __init__(self, rows: int, width: int, *, sharded: bool, filled: bool, kind: Kind) -> None:
        table = nn.Embedding(rows, width, sparse=True)
        with torch.no_grad():
            table.weight.copy_(torch.arange(rows * width).view(rows, width) + 1.0).mul_(1.0 if filled else -1.0)
        self.model: Any = nn.Sequential(ShardedEmbedding.from_embedding(table) if sharded else table)
        self.optimizer: Any = rowstep.SparseAdam(self.model.parameters(), **kind)
        weight = next(self.model.parameters())
        if not sharded and kind.get("second_moment") == "row":  # which a plain weight has after a sparse step only
            counts = torch.zeros(rows, dtype=torch.int64)
            self.optimizer.state[weight] = {"exp_avg_sq_row": torch.zeros(rows), "row_step": counts}
            self.optimizer.state[weight]["step"] = torch.zeros(())
        else:
            self.optimizer.allocate_state()
        state = self.optimizer.state[weight]
        state["step"].fill_(3)
        for number, key in enumerate(sorted(state.keys() - {"step"})):
            content = self.ids().view(-1, *[1] * (state[key].dim() - 1)) + 10 * number + 1
            state[key].copy_(content.expand_as(state[key]) if filled else torch.zeros_like(state[key]))

    def ids(self) -> Tensor:
        part = part_of(self.model[0].weight)
        if part is None:
            return torch.arange(len(self.model[0].weight))
        return part.order.ids(torch.arange(part.positions.start, part.positions.stop))

    def same_as(self, other: Side, *, weights: bool, moments: bool) -> bool:
        """Whether the rows here are those of the same ids of a plain side, which has all."""
        mine, whole = self.model[0].weight, other.model[0].weight
        state, theirs = self.optimizer.state[mine], other.optimizer.state[whole]
        pairs = [(mine, whole)] if weights else []
        if moments:
            pairs += [(state[key], slot) for key, slot in theirs.items() if key != "step"]
        return all(torch.equal(part, all_of_it[self.ids()]) for part, all_of_it in pairs)


def dcp_load(state_dict: dict[str, Any], path: Path) -> None:
    """Torch's load. It goes on where keys are missing, such as those of the constants, and looks at the tensors."""
    state_dict_loader.load(state_dict, checkpoint_id=path, planner=DefaultLoadPlanner(allow_partial_load=True))


def ignore_what_torch_warns_of() -> None:
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
    warnings.filterwarnings("ignore", message="TypedStorage is deprecated")


def from_rank_0(state_dict: Any) -> Any:
    """What each rank passes to ``broadcast_from_rank0``."""
    return state_dict if not dist.is_initialized() or dist.get_rank() == 0 else {}


Route = Callable[[Side, Side, Path], object]

MODEL_ROUTES: dict[str, Route] = {
    "dcp.load": lambda a, b, path: dcp_load({"model": b.model.state_dict()}, path),
    "distributed.load": lambda a, b, path: distributed.load({"model": b.model.state_dict()}, path),
    "load_state_dict": lambda a, b, path: b.model.load_state_dict(a.model.state_dict()),
    "set_model_state_dict, not strict": lambda a, b, path: set_model_state_dict(
        b.model, get_model_state_dict(a.model, options=FULL), options=LOOSE
    ),
    "set_model_state_dict from rank 0": lambda a, b, path: set_model_state_dict(
        b.model, from_rank_0(get_model_state_dict(a.model, options=FULL)), options=FROM_0
    ),
}

OPTIMIZER_ROUTES: dict[str, Route] = {
    "dcp.load": lambda a, b, path: dcp_load({"optimizer": b.optimizer.state_dict()}, path),
    "distributed.load": lambda a, b, path: distributed.load({"optimizer": b.optimizer}, path),
    "torch.save": lambda a, b, path: b.optimizer.load_state_dict(full_optimizer_state(a)),
    "set_optimizer_state_dict": lambda a, b, path: set_optimizer_state_dict(
        b.model, b.optimizer, get_optimizer_state_dict(a.model, a.optimizer, options=FULL), options=FULL
    ),
    "set_optimizer_state_dict, flattened": lambda a, b, path: set_optimizer_state_dict(
        b.model, b.optimizer, get_optimizer_state_dict(a.model, a.optimizer, options=FLAT), options=FLAT
    ),
    "set_optimizer_state_dict from rank 0": lambda a, b, path: set_optimizer_state_dict(
        b.model, b.optimizer, from_rank_0(get_optimizer_state_dict(a.model, a.optimizer, options=FULL)), options=FROM_0
    ),
}


def full_optimizer_state(side: Side) -> Any:
    """A state dict by numbers with whole tensors, as a user who gathers them makes it, through a file."""
    saved = side.optimizer.state_dict()
    saved["state"] = {
        number: {key: slot.full_tensor() if isinstance(slot, DTensor) else slot for key, slot in state.items()}
        for number, state in saved["state"].items()
    }
    return through_a_file(saved)


def take_all_routes(rank: int, rows: int, width: int, kind: Kind, path: Path, to_plain: bool) -> dict[str, str]:
    """For every route from a sharded side to a plain one, or back, what became of the rows."""
    ignore_what_torch_warns_of()
    truth = Side(rows, width, sharded=False, filled=True, kind=kind)
    source = Side(rows, width, sharded=to_plain, filled=True, kind=kind)
    assert source.same_as(truth, weights=True, moments=True)
    saved = {"model": source.model, "optimizer": source.optimizer}
    state_dict_saver.save(saved, checkpoint_id=path / str(to_plain))
    outcomes = {}
    for what, routes in {"model": MODEL_ROUTES, "optimizer": OPTIMIZER_ROUTES}.items():
        for name, route in routes.items():
            if "rank 0" in name and not dist.is_initialized():
                continue
            target = Side(rows, width, sharded=not to_plain, filled=False, kind=kind)
            try:
                route(source, target, path / str(to_plain))
            except (CheckpointException, KeyError, RuntimeError, ValueError) as error:
                outcomes[f"{what}, {name}"] = f"raises {error}"
                continue
            is_right = target.same_as(truth, weights=what == "model", moments=what == "optimizer")
            outcomes[f"{what}, {name}"] = "right" if is_right else "WRONG"
    return outcomes


TO_SHARDED_RAISES = {"model, dcp.load", "optimizer, dcp.load", "optimizer, set_optimizer_state_dict from rank 0"}
TO_PLAIN_RAISES = {
    "optimizer, dcp.load",
    "optimizer, set_optimizer_state_dict, flattened",  # torch drops the constants of the order
    "optimizer, set_optimizer_state_dict from rank 0",  # on all ranks but the first, to which alone it gives them
    *(f"model, {name}" for name in MODEL_ROUTES if name != "distributed.load"),
}


def check(outcomes: list[dict[str, str]], raising: set[str]) -> None:
    for rank, found in enumerate(outcomes):
        assert len(found) >= len(MODEL_ROUTES) + len(OPTIMIZER_ROUTES) - 2
        for name, outcome in found.items():
            if name in raising and not (rank == 0 and outcome == "right" and "from rank 0" in name):
                assert outcome.startswith("raises"), (name, rank, outcome)
                assert any(word in outcome.lower() for word in ("size", "shape")), (name, rank, outcome)
            else:
                assert outcome == "right", (name, rank, outcome)


@pytest.mark.parametrize(
    ("count", "rows", "width", "kind"),
    [
        (0, 4, 4, ELEMENT),  # in this process
        (0, 11, 1, ROW),
        (2, 11, 4, ELEMENT),
        (2, 4, 1, ROW),
        (3, 3, 2, ELEMENT),  # torch could broadcast what it copies into a block of one row, if the shape let it
    ],
)
def test_every_route_is_right_or_raises(
    ranks: Ranks, tmp_path: Path, count: int, rows: int, width: int, kind: Kind
) -> None:
    for to_plain, raising in ((True, TO_PLAIN_RAISES), (False, TO_SHARDED_RAISES)):
        options = (rows, width, kind, tmp_path, to_plain)
        check(ranks.run(count, take_all_routes, *options) if count else [take_all_routes(0, *options)], raising)


@pytest.mark.xfail(strict=True, reason="torch copies one number over another, whatever their shapes")
def test_one_number_per_rank_from_rank_0(ranks: Ranks, tmp_path: Path) -> None:
    check(ranks.run(3, take_all_routes, 3, 1, ELEMENT, tmp_path, False), TO_SHARDED_RAISES)


@pytest.mark.parametrize("rows", [0, 2])
def test_where_the_order_is_that_of_the_ids_state_dicts_are_a_plain_model_s(
    ranks: Ranks, tmp_path: Path, rows: int
) -> None:
    assert [rows for rows in range(200) if RowOrder.spread(rows).is_by_id] == [0, 1, 2]
    assert RowOrder.by_id(11).is_by_id
    assert not RowOrder(11, 1, 3).is_by_id
    for to_plain in (True, False):
        # As they are, the DTensors among them are nothing that torch would copy into a plain weight.
        raising = {"model, load_state_dict"} if to_plain else set()
        check(ranks.run(3, take_all_routes, rows, 4, ELEMENT, tmp_path, to_plain), raising)
        check([take_all_routes(0, rows, 4, ELEMENT, tmp_path / "alone", to_plain)], set())
    plain, sharded = (Side(rows, 4, sharded=sharded, filled=True, kind=ELEMENT) for sharded in (False, True))
    for mine, theirs in (
        (sharded.model.state_dict(), plain.model.state_dict()),
        (sharded.optimizer.state_dict()["state"][0], plain.optimizer.state_dict()["state"][0]),
    ):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)


# torch's optimizers look at shapes only when they step

TORCHS: list[Any] = [torch.optim.Adam, partial(torch.optim.Adam, fused=True), torch.optim.SparseAdam]


@pytest.mark.parametrize("make", TORCHS)
@pytest.mark.parametrize(("rows", "width"), [(4, 4), (11, 1)])
def test_torch_s_optimizers_cannot_step_with_a_sharded_table_s_state(make: Any, rows: int, width: int) -> None:
    sharded = Side(rows, width, sharded=True, filled=True, kind={"fused": True})
    plain = nn.Embedding(rows, width, sparse=make is torch.optim.SparseAdam)
    before = plain.weight.detach().clone()
    optimizer = make(plain.parameters())
    optimizer.load_state_dict(sharded.optimizer.state_dict())
    plain(torch.tensor([0, 3])).sum().backward()
    with pytest.raises(RuntimeError, match=r"size|shape"):
        optimizer.step()
    assert torch.equal(plain.weight, before)


def test_a_state_without_constants_is_no_sharded_table_s_to_a_plain_model() -> None:
    """It may be that of a convolution, which has such shapes too."""
    convolution = nn.Conv1d(4, 11, kernel_size=1, bias=False)
    state = {"step": 1, **{key: torch.ones_like(convolution.weight) for key in ("exp_avg", "exp_avg_sq")}}
    saved = rowstep.SparseAdam(convolution.parameters()).state_dict() | {"state": {0: state}}
    rowstep.SparseAdam(convolution.parameters()).load_state_dict(saved)
    with pytest.raises(ValueError, match=r"'exp_avg' is \(11, 4, 1\) .* expected shape \(11, 4\)"):
        rowstep.SparseAdam(nn.Linear(4, 11, bias=False).parameters()).load_state_dict(saved)


# DTensors from elsewhere


def take_dtensors(rank: int, path: Path) -> None:
    ignore_what_torch_warns_of()
    truth = Side(11, 4, sharded=False, filled=True, kind=ELEMENT)
    whole = truth.model[0].weight.detach()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for placement in (Shard(0), Shard(1), Replicate()):
        target = Side(11, 4, sharded=True, filled=False, kind=ELEMENT)
        target.model.load_state_dict({"0.weight": distribute_tensor(whole, mesh, [placement])})
        assert target.same_as(truth, weights=True, moments=False)

    # In a checkpoint, cut by columns.
    state_dict_saver.save({"model": {"0.weight": distribute_tensor(whole, mesh, [Shard(1)])}}, checkpoint_id=path)
    target = Side(11, 4, sharded=True, filled=False, kind=ELEMENT)
    distributed.load({"model": target.model.state_dict()}, path)
    assert target.same_as(truth, weights=True, moments=False)

    # In blocks of our order, but of other ranks: each has all of them.
    source = Side(11, 4, sharded=True, filled=True, kind=ELEMENT)
    spread = source.model.state_dict()["0.weight"].full_tensor()
    alone = [dist.new_group([each]) for each in range(dist.get_world_size())][rank]
    target = Side(11, 4, sharded=True, filled=False, kind=ELEMENT)
    mesh = DeviceMesh.from_group(alone, "cpu")
    target.model.load_state_dict({"0.weight": DTensor.from_local(spread, mesh, [Shard(0)])})
    assert target.same_as(truth, weights=True, moments=False)

    saved = source.optimizer.state_dict()
    mesh = saved["state"][0]["exp_avg"].device_mesh
    block = torch.zeros(*source.model[0].weight.shape)
    saved["state"][0]["exp_avg"] = DTensor.from_local(
        block, mesh, [Shard(0)], run_check=False, shape=spread.shape, stride=spread.stride()
    )
    with pytest.raises(ValueError, match=r"has shape \(11, 4, 1\), but \(\d, 4\) on this rank"):
        target.optimizer.load_state_dict(saved)


def test_dtensors_from_elsewhere_are_put_into_place(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, take_dtensors, tmp_path)


def test_the_shape_decides_even_if_constants_came_along() -> None:
    table, plain = ShardedEmbedding(11, 4), nn.Embedding(11, 4)
    for shape in [(11, 1, 4), (11, 4, 2), (12, 4, 1)]:
        with pytest.raises(ValueError, match="expected all 11 rows of the table, as state_dict"):
            table.load_state_dict({"weight": torch.zeros(shape)})
    table.load_state_dict({"weight": plain.weight.detach(), ROW_ORDER: torch.tensor([11, 3, 2])})
    assert torch.equal(table.full_weight(), plain.weight)
    ids = RowOrder(11, 3, 2).ids(torch.arange(11))
    table.load_state_dict({"weight": plain.weight.detach()[ids].unsqueeze(-1), ROW_ORDER: torch.tensor([11, 3, 2])})
    assert torch.equal(table.full_weight(), plain.weight)

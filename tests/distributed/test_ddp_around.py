"""What ``ddp`` refuses, on every rank, and what it leaves to torch."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from rowstep import DeferredAdam, StaleRowsError
from rowstep.distributed import PeerError, ShardedEmbedding, ShardedEmbeddingBag, ddp
from tests.helpers.gradients import same_bits
from tests.helpers.ranks import Ranks, new_group_in_order

WIDTH = 2


def message_of(kind: type[Exception], action: Callable[[], object]) -> str:
    with pytest.raises(kind) as caught:
        action()
    return str(caught.value)


def model_over(group: Any) -> nn.Module:
    return nn.Sequential(ShardedEmbedding(8, WIDTH, group=group), nn.Linear(WIDTH, 1))


# Groups


def tables_of_other_ranks(rank: int) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = pairs[rank // 2]
    members = [[0, 1], [2, 3]][rank // 2]

    in_pairs, over_all = model_over(mine), model_over(None)
    before = [param.detach().clone() for param in in_pairs.parameters()]
    assert f"'0' is sharded over the ranks {members}; expected [0, 1, 2, 3]" in message_of(
        ValueError, lambda: ddp(in_pairs)
    )
    assert all(same_bits(param.detach(), old) for param, old in zip(in_pairs.parameters(), before, strict=True))
    assert not hasattr(in_pairs, "_ddp_params_and_buffers_to_ignore")  # torch's DDP would still refuse it
    assert f"'0' is sharded over the ranks [0, 1, 2, 3]; expected {members}" in message_of(
        ValueError, lambda: ddp(over_all, process_group=mine)
    )
    alone = dist.new_group([rank], use_local_synchronization=True)
    assert f"ranks [{rank}]; expected [0, 1, 2, 3]" in message_of(ValueError, lambda: ddp(model_over(alone)))

    # One rank that is wrong is enough, and all hear of it.
    one_is_wrong = model_over(alone if rank == 2 else None)
    text = message_of(ValueError if rank == 2 else PeerError, lambda: ddp(one_is_wrong))
    assert "over the ranks [2]; expected [0, 1, 2, 3]" in text

    # The ranks count, not the group, nor their order.
    backwards = new_group_in_order([3, 2, 1, 0])
    for model, group in [
        (over_all, backwards),
        (model_over(backwards), None),
        (in_pairs, mine),
        (model_over(alone), alone),
    ]:
        wrapped = ddp(model, process_group=group)
        torch.autograd.backward(wrapped(torch.tensor([rank])).sum())


def test_sharded_tables_have_the_ranks_of_ddp(ranks: Ranks) -> None:
    ranks.run(4, tables_of_other_ranks)


def a_table_that_nobody_shares(rank: int, model: nn.Module) -> None:
    text = message_of(ValueError, lambda: ddp(model))
    assert f"ranks [{rank}] because it was created before init_process_group; expected [0, 1]" in text
    ddp(model, process_group=dist.new_group([rank], use_local_synchronization=True))


def test_a_table_that_was_made_before_the_process_group_is_refused(ranks: Ranks) -> None:
    ranks.run(2, a_table_that_nobody_shares, model_over(None))


# Names


class Named(ShardedEmbedding):
    """A table that is the outermost module and has a parameter of its own, and a weight that has two names."""

    def __init__(self, inner: ShardedEmbedding) -> None:
        super().__init__(8, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.also = inner.weight
        self.inner = inner
        self.again = inner

    def forward(self, ids: Tensor) -> Tensor:
        read: Tensor = super().forward(ids) + self.again(ids)
        return read * self.scale


def tables_with_several_names(rank: int) -> None:
    inner = ShardedEmbedding(8, WIDTH)
    outer = Named(inner)
    before = [table.full_weight() for table in (inner, outer)]
    wrapped = ddp(outer)
    assert all(same_bits(table.full_weight(), old) for table, old in zip((inner, outer), before, strict=True))
    torch.autograd.backward(wrapped(torch.tensor([rank, rank])).sum())
    for table in (inner, outer):
        assert table.weight.grad is not None
        owned = len(table.local_rows(torch.tensor([0, 1])))  # each rank has looked up one of them, twice
        assert table.weight.grad.to_dense().sum().item() == owned * WIDTH
    assert outer.scale.grad is not None


def test_sharded_tables_are_left_alone_under_any_name(ranks: Ranks) -> None:
    ranks.run(2, tables_with_several_names)


# What there is to average


def models_without_gradients(rank: int) -> None:
    tables = nn.ModuleList([ShardedEmbedding(8, WIDTH), ShardedEmbeddingBag(8, WIDTH)])
    for model in (tables, tables[0], nn.ReLU(), nn.Linear(2, 2).requires_grad_(False)):
        text = message_of(ValueError, partial(ddp, model))
        assert "no parameter that needs a gradient outside of sharded tables" in text
        assert "Use the model itself instead" in text
    frozen = nn.Sequential(nn.Embedding(8, WIDTH, sparse=True), nn.Linear(WIDTH, 1))
    frozen[0].requires_grad_(False)
    wrapped = ddp(frozen, static_graph=True)  # no gradient of the table is ever exchanged
    assert not wrapped.find_unused_parameters
    torch.autograd.backward(wrapped(torch.tensor([rank])).sum())


def test_a_model_without_anything_to_average_is_refused(ranks: Ranks) -> None:
    ranks.run(2, models_without_gradients)


# Options, hooks and copies


def joins(rank: int) -> None:
    """Rank 1 has a batch more. Where there are no tables, torch's join works as without us."""
    torch.manual_seed(5)
    dense = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    ours, torchs = ddp(copy.deepcopy(dense)), DistributedDataParallel(dense)
    for model in (ours, torchs):
        with model.join(divide_by_initial_world_size=False):
            for step in range(2 + rank):
                batch = torch.randn(2, 3, generator=torch.Generator().manual_seed(10 * step + rank))
                torch.autograd.backward(model(batch).square().sum())
    for param, expected in zip(ours.parameters(), torchs.parameters(), strict=True):
        assert param.grad is not None
        assert expected.grad is not None
        assert same_bits(param.grad, expected.grad)

    replicated = nn.Sequential(nn.Embedding(8, WIDTH, sparse=True), nn.Linear(WIDTH, 1))
    for model in (ddp(replicated), ddp(model_over(None))):
        for refused in (model.join, partial(Join, [model])):
            assert "join is not supported for a model with sparse tables" in message_of(RuntimeError, refused)
        with model.join(enable=False):
            torch.autograd.backward(model(torch.tensor([rank])).sum())
        torch.autograd.backward(model(torch.tensor([rank])).sum())


def test_join_is_torchs_without_tables_and_refused_with_them(ranks: Ranks) -> None:
    ranks.run(2, joins)


def options_and_copies(rank: int) -> None:
    replicated = nn.Sequential(nn.Embedding(8, WIDTH, sparse=True), nn.Linear(WIDTH, 1))
    mesh = init_device_mesh("cpu", (2,))
    refused: dict[str, Any] = {"static_graph": True, "mixed_precision": object(), "device_mesh": mesh}
    for option, value in refused.items():
        assert option in message_of(ValueError, partial(ddp, replicated, **{option: value}))
    ddp(replicated, process_group=mesh.get_group())

    # What one rank alone asks for, all refuse.
    text = message_of(ValueError if rank else PeerError, lambda: ddp(replicated, static_graph=rank == 1))
    assert "static_graph=True is not supported" in text

    # Models without replicated tables may have a hook of the program's.
    wrapped = ddp(model_over(None))
    wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    torch.autograd.backward(wrapped(torch.tensor([rank])).sum())
    assert "register_comm_hook" in message_of(
        RuntimeError, lambda: ddp(replicated).register_comm_hook(None, default_hooks.allreduce_hook)
    )

    for action in (copy.copy, copy.deepcopy, pickle.dumps):
        assert "Copy or save its .module instead" in message_of(RuntimeError, partial(action, wrapped))
    ddp(copy.deepcopy(wrapped.module))


def test_options_and_copies_that_cannot_work_are_refused(ranks: Ranks) -> None:
    ranks.run(2, options_and_copies)


def other_ranks_rows(rank: int, path: Path) -> None:
    """DeferredAdam knows of our wrapper that gradients name rows which others have read, and not of torch's."""
    torchs = DistributedDataParallel
    for wrap, allow_stale in ((torchs, False), (torchs, True), (ddp, False)):
        torch.manual_seed(0)
        table = nn.Embedding(8, WIDTH, sparse=True)
        wrapped, optimizer = wrap(table), DeferredAdam(table.parameters(), allow_stale=allow_stale)
        for step in range(2):
            optimizer.zero_grad()
            torch.autograd.backward(wrapped(torch.tensor([2 * step + rank, 7])).sum())
            if step == 0 or wrap is ddp or allow_stale:
                optimizer.step()
            else:
                text = message_of(StaleRowsError, optimizer.step)
                assert "wrap the model by rowstep.distributed.ddp, or pass allow_stale=True" in text

    # What notes the wrapper is no part of what is saved.
    torch.save(table.weight, path / str(rank))
    assert same_bits(torch.load(path / str(rank), weights_only=True), table.weight)


def test_a_deferred_table_under_ddp_reads_what_other_ranks_have_read(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, other_ranks_rows, tmp_path)

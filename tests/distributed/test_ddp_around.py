"""What ``ddp`` refuses, on every rank, and what it leaves to torch."""

from __future__ import annotations

import copy
import datetime
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
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.parallel import DistributedDataParallel

from rowstep import DeferredAdam, SparseAdam, StaleRowsError
from rowstep._part import ROW_ORDER
from rowstep.distributed import PeerError, ShardedEmbedding, ShardedEmbeddingBag, ddp
from rowstep.distributed._exchange import twin_group
from tests.helpers.gradients import same_bits
from tests.helpers.ranks import Ranks, new_group_in_order

WIDTH = 2


def message_of(kind: type[Exception], action: Callable[[], object]) -> str:
    with pytest.raises(kind) as caught:
        action()
    return str(caught.value)


def model_over(group: Any) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(ShardedEmbedding(8, WIDTH, group=group), nn.Linear(WIDTH, 1))


def replicated() -> Any:
    return nn.Sequential(nn.Embedding(8, WIDTH, sparse=True), nn.Linear(WIDTH, 1))


def tables_of_other_ranks(rank: int) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = pairs[rank // 2]
    members = [[0, 1], [2, 3]][rank // 2]

    in_pairs, over_all = model_over(mine), model_over(None)
    before = copy.deepcopy(list(in_pairs.parameters()))
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
    for model, group in [(over_all, backwards), (model_over(backwards), None), (in_pairs, mine)]:
        wrapped = ddp(model, process_group=group)
        torch.autograd.backward(wrapped(torch.tensor([rank])).sum())


def a_table_that_nobody_shares(rank: int, model: nn.Module) -> None:
    text = message_of(ValueError, lambda: ddp(model))
    assert f"ranks [{rank}] because it was created before init_process_group; expected [0, 1]" in text
    ddp(model, process_group=dist.new_group([rank], use_local_synchronization=True))


def test_a_table_that_was_made_before_the_process_group_is_refused(ranks: Ranks) -> None:
    ranks.run(2, a_table_that_nobody_shares, model_over(None))


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
    before = [table.full_weight() for table in (inner, outer)]  # in blocks of one shape, which DDP would make alike
    assert all(len(torch.unique(old, dim=0)) == 8 for old in before)
    wrapped = ddp(outer)
    assert all(same_bits(table.full_weight(), old) for table, old in zip((inner, outer), before, strict=True))
    torch.autograd.backward(wrapped(torch.tensor([rank, rank])).sum())
    for table in (inner, outer):
        assert table.weight.grad is not None
        owned = len(table.local_rows(torch.tensor([0, 1])))  # each rank has looked up one of them, twice
        assert table.weight.grad.to_dense().sum().item() == owned * WIDTH
    assert outer.scale.grad is not None


def models_without_gradients(rank: int) -> None:
    tables = nn.ModuleList([ShardedEmbedding(8, WIDTH), ShardedEmbeddingBag(8, WIDTH)])
    for model in (tables, tables[0], nn.ReLU(), nn.Linear(2, 2).requires_grad_(False)):
        text = message_of(ValueError, partial(ddp, model))
        assert "no parameter that needs a gradient outside of sharded tables" in text
        assert "Use the model itself instead" in text
    frozen = replicated()
    frozen[0].requires_grad_(False)
    wrapped = ddp(frozen, static_graph=True)  # no gradient of the table is ever exchanged
    assert not wrapped.find_unused_parameters
    torch.autograd.backward(wrapped(torch.tensor([rank])).sum())


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
    grads, expected = ([param.grad for param in model.parameters()] for model in (ours, torchs))
    torch.testing.assert_close(grads, expected, rtol=0, atol=0)

    for model in (ddp(replicated()), ddp(model_over(None))):
        for refused in (model.join, partial(Join, [model])):
            assert "join is not supported for a model with sparse tables" in message_of(RuntimeError, refused)
        with model.join(enable=False):
            torch.autograd.backward(model(torch.tensor([rank])).sum())
        torch.autograd.backward(model(torch.tensor([rank])).sum())


def options_and_copies(rank: int) -> None:
    whole = replicated()
    mesh = init_device_mesh("cpu", (2,))
    refused: dict[str, Any] = {"static_graph": True, "mixed_precision": object(), "device_mesh": mesh}
    for option, value in refused.items():
        assert option in message_of(ValueError, partial(ddp, whole, **{option: value}))
    ddp(whole, process_group=mesh.get_group())

    # What one rank alone asks for, all refuse.
    text = message_of(ValueError if rank else PeerError, lambda: ddp(whole, static_graph=rank == 1))
    assert "static_graph=True is not supported" in text

    # Models without replicated tables may have a hook of the program's.
    wrapped = ddp(model_over(None))
    wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    torch.autograd.backward(wrapped(torch.tensor([rank])).sum())
    assert "register_comm_hook" in message_of(
        RuntimeError, lambda: ddp(whole).register_comm_hook(None, default_hooks.allreduce_hook)
    )

    for action in (copy.copy, copy.deepcopy, pickle.dumps):  # torch refuses any group but the default one
        assert "only supported when using DDP with the default process group" in message_of(
            RuntimeError, partial(action, wrapped)
        )
    ddp(copy.deepcopy(wrapped.module))

    # Who has no tables need not look for unused ones, and the user's word is the last.
    assert not ddp(nn.Linear(2, 2)).find_unused_parameters
    assert ddp(whole).find_unused_parameters
    assert not ddp(whole, find_unused_parameters=False).find_unused_parameters


def wrap_wrongly(rank: int) -> None:
    wrapped = DistributedDataParallel(model_over(None))
    assert "use rowstep.distributed.ddp" in message_of(RuntimeError, lambda: wrapped(torch.arange(3)))

    model = model_over(None)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["1.bias"])  # type: ignore[no-untyped-call]
    assert ddp(model).parameters_to_ignore == {"0.weight", f"0.{ROW_ORDER}", "1.bias"}

    group = dist.new_group([0])
    if rank == 1:
        assert "not in the process group" in message_of(ValueError, lambda: model_over(group))


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


# The group of DDP's own: a twin of the given one, which needs no other rank


def sum_of_ranks(group: Any) -> int:
    total = torch.tensor(1 << dist.get_rank())
    dist.all_reduce(total, group=group)
    return int(total)


def mean_gradient(rank: int, group: Any = None) -> float:
    wrapped: Any = ddp(nn.Linear(1, 1, bias=False), process_group=group)
    torch.autograd.backward(wrapped(torch.tensor([[float(rank)]])).sum())
    return float(wrapped.module.weight.grad)


def in_different_numbers_of_groups(rank: int) -> None:
    """Rank 2 is in fewer groups than the others, then rank 0 has one less left."""
    if rank < 2:
        dist.new_group([0, 1], use_local_synchronization=True)
    assert mean_gradient(rank) == pytest.approx(1)
    group = dist.new_group([0, 1])
    if rank == 0:
        dist.destroy_process_group(group)
    assert mean_gradient(rank) == pytest.approx(1)


def twins_of_many(rank: int) -> None:
    groups = {members: dist.new_group(members) for members in [(0, 1), (1, 2), (0, 2, 3), (3,), (0, 1, 2, 3)]}
    # Each rank makes only the twins of its own groups: the others do not take part.
    mine = {members: group for members, group in groups.items() if rank in members}
    twins = [(members, twin_group(group)) for members, group in mine.items() for _ in range(2)]
    twins.append(((0, 1, 2, 3), twin_group(None)))
    twins.append(((0, 1, 2, 3), twin_group(twins[-1][1])))
    for members, twin in reversed(twins):
        assert dist.get_process_group_ranks(twin) == list(members)
        assert sum_of_ranks(twin) == sum(1 << member for member in members)
    names = [group.group_name for group in [*mine.values(), *(twin for _, twin in twins)]]
    assert len(set(names)) == len(names)

    # They do not get in the way of torch's own groups.
    assert sum_of_ranks(dist.new_group([0, 1, 2, 3])) == 15
    if rank in (1, 3):
        local = dist.new_group([1, 3], use_local_synchronization=True)
        assert sum_of_ranks(local) == 10
        assert mean_gradient(rank, local) == pytest.approx(2)


def order_and_timeouts(rank: int) -> None:
    patience = datetime.timedelta(seconds=17)
    pair = new_group_in_order([2, 0], timeout=patience)
    world = twin_group(None)
    assert timeout_of(world) == timeout_of(dist.group.WORLD)
    if rank == 1:
        for refused in (twin_group, lambda group: ddp(nn.Linear(1, 1), process_group=group)):
            with pytest.raises(ValueError, match="this process is not in the process group"):
                refused(pair)
        return
    twin = twin_group(pair)
    members = dist.get_process_group_ranks(pair)
    assert dist.get_process_group_ranks(twin) == members
    assert dist.get_rank(twin) == dist.get_rank(pair) == members.index(rank)
    assert timeout_of(twin) == patience
    assert dist.get_backend_config(twin) == dist.get_backend_config(pair)
    assert timeout_of(ddp(nn.Linear(1, 1), process_group=pair).process_group) == patience
    if hasattr(pair, "set_timeout"):  # an older torch keeps the first
        pair.set_timeout(2 * patience)
        assert timeout_of(twin_group(pair)) == 2 * patience


def timeout_of(group: Any) -> datetime.timedelta:
    timeout: datetime.timedelta = group._get_backend(torch.device("cpu")).options._timeout
    return timeout


@pytest.mark.parametrize(
    ("count", "program"),
    [
        (4, tables_of_other_ranks),
        (2, tables_with_several_names),
        (2, models_without_gradients),
        (2, joins),
        (2, options_and_copies),
        (2, wrap_wrongly),
        (3, in_different_numbers_of_groups),
        (4, twins_of_many),
        (3, order_and_timeouts),
    ],
)
def test_what_is_refused_and_what_is_left_to_torch(ranks: Ranks, count: int, program: Callable[[int], None]) -> None:
    ranks.run(count, program)


def test_a_deferred_table_under_ddp_reads_what_other_ranks_have_read(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, other_ranks_rows, tmp_path)


def scale_with_an_overflow(rank: int) -> tuple[float, float, Tensor]:
    model = model_over(None)
    with torch.no_grad():
        model[1].weight.fill_(1e34)  # the table's gradient overflows, on the row's owner; the layer's does not
    parallel, optimizer = ddp(model), SparseAdam(model.parameters(), lr=0.1)
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

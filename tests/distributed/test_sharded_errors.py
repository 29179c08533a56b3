"""What goes wrong on one rank is heard of on all, in the same call; and what cannot be honoured is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.nn import functional

import rowstep
from rowstep.distributed import PeerError, ShardedEmbedding, ShardedEmbeddingBag, ShardedEmbeddingCollection, ddp
from tests.helpers.ranks import Ranks

ROWS, WIDTH, RANKS = 103, 3, 3


def assert_heard(rank: int, action: Callable[[], object], culprits: dict[int, str], text: str) -> None:
    """The culprits raise what went wrong, all others a PeerError that names them and says the same."""
    with pytest.raises(Exception, match=re.escape(text)) as caught:
        action()
    message = str(caught.value)
    assert caught.type.__name__ == culprits.get(rank, PeerError.__name__)
    if rank not in culprits:
        assert all(f"rank {culprit}: {its_kind}: " in message for culprit, its_kind in culprits.items())
        assert message.count("rank ") == len(culprits)


IDS = torch.tensor([[1, 2, 3], [4, 4, 0]])

BAD_IDS: list[tuple[Any, str, str]] = [
    (torch.tensor([1, ROWS]), "IndexError", f"id {ROWS} is outside the table; expected 0 <= id < {ROWS}"),
    (torch.tensor([5, -1]), "IndexError", "id -1 is outside the table"),
    (torch.tensor([1.0]), "TypeError", "the ids are torch.float32; expected a tensor of torch.int32 or torch.int64"),
    ([1, 2], "TypeError", "the ids are list"),
    (torch.tensor([1], device="meta"), "ValueError", "the ids are on meta; expected cpu, the table's device"),
]

BAD_BAGS: list[tuple[tuple[Any, ...], str, str]] = [
    ((torch.tensor([1, 2, 3]), torch.tensor([0, 9])), "RuntimeError", "offsets[-1] can not be greater than input's"),
    ((torch.tensor([1, 2, 3]),), "ValueError", "offsets has to be a 1D Tensor"),
    ((IDS, None, torch.rand(3)), "ValueError", "must have the same shape as the input"),
    ((IDS, None, torch.rand(2, 3, dtype=torch.float64)), "RuntimeError", "per_sample_weights"),
]


def lookups_that_fail(rank: int) -> None:
    """On one rank after the other; all ranks read, and learn, as before right after that."""
    torch.manual_seed(0)
    table, bag = ShardedEmbedding(ROWS, WIDTH), ShardedEmbeddingBag(ROWS, WIDTH, mode="sum")
    before, bags_before = table(IDS).detach(), bag(IDS).detach()
    for number, (bad, kind, text) in enumerate(BAD_IDS):
        culprit = number % RANKS
        assert_heard(rank, partial(table, bad if rank == culprit else IDS), {culprit: kind}, text)
        table.zero_grad()
        read = table(IDS)
        read.sum().backward()
        assert torch.equal(read, before)
    for number, (arguments, kind, text) in enumerate(BAD_BAGS):
        culprit = number % RANKS
        assert_heard(rank, partial(bag, *(arguments if rank == culprit else (IDS,))), {culprit: kind}, text)
        assert torch.equal(bag(IDS), bags_before)
    both = {1: "IndexError", 2: "IndexError"}
    assert_heard(rank, lambda: table(torch.tensor([-7]) if rank else IDS), both, "id -7 is outside")


class GrumbleError(Exception):
    """Something that this library knows nothing of."""


class Grumbling(nn.Parameter):
    """Rows that cannot be read: as when those that wait cannot catch up for want of memory."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (functional.embedding, Tensor.detach):
            raise GrumbleError("I do not feel like it")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def reads_that_raise(rank: int) -> None:
    torch.manual_seed(0)
    table, bag = ShardedEmbedding(ROWS, WIDTH), ShardedEmbeddingBag(ROWS, WIDTH)
    if rank == 1:
        table.weight.__class__ = bag.weight.__class__ = Grumbling
    for action in (partial(table, IDS), partial(bag, IDS), table.full_weight, bag.to_embedding):
        assert_heard(rank, action, {1: "GrumbleError"}, "I do not feel like it")
    table.weight.__class__ = bag.weight.__class__ = nn.Parameter
    assert table(IDS).shape == (2, 3, WIDTH)
    assert table.full_weight().shape == (ROWS, WIDTH)


def clipping_that_raises(rank: int) -> None:
    table, dense = ShardedEmbedding(ROWS, WIDTH), nn.Linear(WIDTH, 1)
    params = [*table.parameters(), *dense.parameters()]

    def gradient() -> Tensor:
        for param in params:
            param.grad = None
        dense(table(IDS)).sum().backward()
        assert table.weight.grad is not None
        return table.weight.grad

    grad = gradient()
    if rank == 2:
        outside = torch.tensor([[len(table.weight) + 1]])
        table.weight.grad = torch.sparse_coo_tensor(outside, torch.ones(1, WIDTH), grad.shape, check_invariants=False)
    assert_heard(rank, lambda: rowstep.clip_grad_norm_(params, 1.0), {2: "IndexError"}, "index")
    grad = gradient()
    if rank == 0:
        rows = torch.full((1, WIDTH), torch.nan)
        table.weight.grad = torch.sparse_coo_tensor(torch.tensor([[0]]), rows, grad.shape, check_invariants=True)
    with pytest.raises(RuntimeError, match="is nan, so it cannot be clipped"):  # on all: the norm is everybody's
        rowstep.clip_grad_norm_(params, 1.0, error_if_nonfinite=True)
    gradient()
    rowstep.clip_grad_norm_(params, 1.0)


@pytest.mark.parametrize("cls", [ShardedEmbedding, ShardedEmbeddingBag])
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"scale_grad_by_freq": True}, "scale_grad_by_freq=True is not supported"),
        ({"sparse": False}, "sparse=False is not supported"),
        ({"gradient": "median"}, "Invalid gradient value: 'median'; expected 'mean' or 'sum'"),
        ({"padding_idx": ROWS}, "padding_idx is 103; expected -103 <= padding_idx < 103"),
        ({"_weight": torch.zeros(ROWS + 1, WIDTH)}, r"the full table has shape \(104, 3\); expected \(103, 3\)"),
    ],
)
def test_what_cannot_be_honoured_is_refused(cls: type[nn.Module], options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        cls(ROWS, WIDTH, **options)
    with pytest.raises(ValueError, match="Invalid mode value: 'median'; expected 'sum', 'mean' or 'max'"):
        ShardedEmbeddingBag(ROWS, WIDTH, mode="median")  # type: ignore[arg-type]


def surgery(rank: int) -> None:
    for make in (rowstep.SparseAdam, rowstep.DeferredAdam):
        torch.manual_seed(0)
        table = ShardedEmbedding(ROWS, WIDTH)
        optimizer: Any = make(table.parameters())
        table(torch.arange(60)).sum().backward()
        optimizer.step()
        before, weight = table.full_weight(), table.weight
        flipped = torch.arange(len(weight)).flip(0)
        surgeries = {optimizer.grow: 2, optimizer.keep_rows: flipped[:2], optimizer.permute_rows: flipped}
        for operate, how in surgeries.items():
            with pytest.raises(ValueError, match=rf"{len(weight)} of the {ROWS} rows of a sharded table; expected"):
                operate(weight, how)

        ids = torch.tensor([3, 50, 99])
        optimizer.reset_rows(weight, table.local_rows(ids))
        assert torch.equal(table.full_weight(), before)
        moments = optimizer.state_dict()["state"][0]["exp_avg"].full_tensor().flatten(1)
        known = torch.zeros(ROWS, dtype=torch.bool)
        known[table._shard.order.ids(torch.arange(ROWS))] = moments.ne(0).any(1)
        assert torch.equal(known.nonzero().view(-1), torch.tensor([id for id in range(60) if id not in (3, 50)]))
        with pytest.raises(IndexError, match=f"id {ROWS} is outside the table"):
            table.local_rows(torch.tensor([ROWS]))
        bags = ShardedEmbeddingBag(ROWS, WIDTH, padding_idx=3)
        assert torch.equal(bags.local_rows(ids), table.local_rows(ids))


@pytest.mark.parametrize("program", [lookups_that_fail, reads_that_raise, clipping_that_raises, surgery])
def test_errors_are_heard_on_all_ranks_and_the_table_goes_on(ranks: Ranks, program: Callable[[int], None]) -> None:
    ranks.run(RANKS, program)


@pytest.mark.parametrize("is_default", [True, False])
def test_what_needs_a_destroyed_process_group_says_so(is_default: bool) -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    group = None if is_default else dist.new_group([0])
    table = ShardedEmbedding(ROWS, WIDTH, group=group)
    tables = ShardedEmbeddingCollection({"user": (ROWS, WIDTH)}, group=group)
    model = nn.Sequential(table, nn.Linear(WIDTH, 1))
    optimizer = rowstep.SparseAdam(model.parameters())
    loss = table(IDS).sum()
    state_dict = model.state_dict()
    dist.destroy_process_group(group)
    if is_default:  # and another one does not help
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        for action in (
            model.state_dict,
            optimizer.state_dict,
            optimizer.step,  # there is a lookup without a backward pass
            loss.backward,
            partial(table, IDS),
            partial(tables, {"user": IDS}),
            table.to_embedding,
            partial(model.load_state_dict, state_dict),
            partial(rowstep.clip_grad_norm_, table.parameters(), 1.0),
            partial(ddp, model),
        ):
            with pytest.raises(ValueError, match=r"process group was destroyed; expected .* Save checkpoints before"):
                action()
        assert len(table.weight[table.local_rows(IDS)]) == IDS.numel()
    finally:
        dist.destroy_process_group()

"""What goes wrong on one rank is heard of on all, in the same call; and what cannot be honoured is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import rowstep
from rowstep.distributed import PeerError, ShardedEmbedding, ShardedEmbeddingBag
from tests.helpers.ranks import Ranks

ROWS, WIDTH, RANKS = 103, 3, 3

Outcome = tuple[str, str]


def outcome_of(action: Callable[[], object]) -> Outcome:
    try:
        action()
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def assert_heard_everywhere(outcomes: list[Outcome], culprits: dict[int, str], text: str) -> None:
    """The culprits raise what went wrong, all others a PeerError that names them and says the same."""
    for rank, (kind, message) in enumerate(outcomes):
        if rank in culprits:
            assert kind == culprits[rank]
            assert text in message
        else:
            assert kind == PeerError.__name__
            for culprit, its_kind in culprits.items():
                assert f"rank {culprit}: {its_kind}: " in message
            assert text in message
            assert message.count("rank ") == len(culprits)


# Lookups

IDS = torch.tensor([[1, 2, 3], [4, 4, 0]])

BAD_IDS: list[tuple[Any, str, str]] = [
    (torch.tensor([1, ROWS]), "IndexError", f"id {ROWS} is outside the table; expected 0 <= id < {ROWS}"),
    (torch.tensor([5, -1]), "IndexError", "id -1 is outside the table"),
    (torch.tensor([1.0]), "TypeError", "the ids are torch.float32; expected a tensor of torch.int32 or torch.int64"),
    ([1, 2], "TypeError", "the ids are list"),
    (None, "TypeError", "the ids are NoneType"),
    (torch.tensor([1], device="meta"), "ValueError", "the ids are on meta; expected cpu, the table's device"),
]

BAD_BAGS: list[tuple[tuple[Any, ...], str, str]] = [
    ((torch.tensor([1, 2, ROWS]), torch.tensor([0])), "IndexError", f"id {ROWS} is outside"),
    ((torch.tensor([1, 2, 3]), torch.tensor([0, 9])), "RuntimeError", "offsets[-1] can not be greater than input's"),
    ((torch.tensor([1, 2, 3]),), "ValueError", "offsets has to be a 1D Tensor"),
    ((IDS, None, torch.rand(3)), "ValueError", "must have the same shape as the input"),
    ((IDS, None, torch.rand(2, 3, dtype=torch.float64)), "RuntimeError", "per_sample_weights"),
]


def lookups_that_fail(rank: int) -> list[tuple[Outcome, Tensor]]:
    """On one rank after the other; and what all ranks read, and learn, right after that."""
    torch.manual_seed(0)
    table = ShardedEmbedding(ROWS, WIDTH)
    bag = ShardedEmbeddingBag(ROWS, WIDTH, mode="sum")
    seen = []
    for number, (bad, _, _) in enumerate(BAD_IDS):
        outcome = outcome_of(partial(table, bad if rank == number % RANKS else IDS))
        table.zero_grad()
        read = table(IDS)
        read.sum().backward()
        seen.append((outcome, read.detach()))
    for number, (arguments, _, _) in enumerate(BAD_BAGS):
        outcome = outcome_of(partial(bag, *(arguments if rank == number % RANKS else (IDS,))))
        seen.append((outcome, bag(IDS).detach()))
    both = outcome_of(lambda: table(torch.tensor([-7]) if rank else IDS))
    seen.append((both, table(IDS).detach()))
    return seen


def test_a_lookup_that_fails_on_one_rank_fails_on_all_and_the_table_goes_on(ranks: Ranks) -> None:
    torch.manual_seed(0)
    read = ShardedEmbedding(ROWS, WIDTH)(IDS).detach()
    of_bags = ShardedEmbeddingBag(ROWS, WIDTH, mode="sum")(IDS).detach()
    results = ranks.run(RANKS, lookups_that_fail)
    bad = [(number % RANKS, kind, text, read) for number, (_, kind, text) in enumerate(BAD_IDS)]
    bad += [(number % RANKS, kind, text, of_bags) for number, (_, kind, text) in enumerate(BAD_BAGS)]
    for number, (culprit, kind, text, expected) in enumerate(bad):
        outcomes = [result[number][0] for result in results]
        assert_heard_everywhere(outcomes, {culprit: kind}, text)
        for result in results:
            torch.testing.assert_close(result[number][1], expected)
    assert_heard_everywhere(
        [result[-1][0] for result in results], {1: "IndexError", 2: "IndexError"}, "id -7 is outside"
    )


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


def reads_that_raise(rank: int) -> list[Outcome]:
    torch.manual_seed(0)
    table = ShardedEmbedding(ROWS, WIDTH)
    bag = ShardedEmbeddingBag(ROWS, WIDTH)
    if rank == 1:
        table.weight.__class__ = bag.weight.__class__ = Grumbling
    actions: list[Callable[[], object]] = [
        lambda: table(IDS),
        lambda: bag(IDS),
        table.full_weight,
        bag.to_embedding,
    ]
    outcomes = [outcome_of(action) for action in actions]
    table.weight.__class__ = bag.weight.__class__ = nn.Parameter
    assert table(IDS).shape == (2, 3, WIDTH)
    assert table.full_weight().shape == (ROWS, WIDTH)
    return outcomes


def test_a_read_that_raises_on_one_rank_is_heard_on_all(ranks: Ranks) -> None:
    results = ranks.run(RANKS, reads_that_raise)
    for outcomes in zip(*results, strict=True):
        assert_heard_everywhere(list(outcomes), {1: "GrumbleError"}, "I do not feel like it")


def clipping_that_raises(rank: int) -> list[Outcome]:
    table = ShardedEmbedding(ROWS, WIDTH)
    dense = nn.Linear(WIDTH, 1)
    params = [*table.parameters(), *dense.parameters()]

    def prepare() -> None:
        for param in params:
            param.grad = None
        dense(table(IDS)).sum().backward()

    prepare()
    grad = table.weight.grad
    assert grad is not None
    if rank == 2:
        outside = torch.tensor([[len(table.weight) + 1]])
        table.weight.grad = torch.sparse_coo_tensor(outside, torch.ones(1, WIDTH), grad.shape, check_invariants=False)
    outcomes = [outcome_of(lambda: rowstep.clip_grad_norm_(params, 1.0))]
    prepare()
    if rank == 0:
        assert table.weight.grad is not None
        table.weight.grad = torch.sparse_coo_tensor(
            torch.tensor([[0]]), torch.full((1, WIDTH), torch.nan), table.weight.shape, check_invariants=True
        )
    outcomes.append(outcome_of(lambda: rowstep.clip_grad_norm_(params, 1.0, error_if_nonfinite=True)))
    prepare()
    outcomes.append(outcome_of(lambda: rowstep.clip_grad_norm_(params, 1.0)))
    return outcomes


def test_clipping_that_raises_on_one_rank_raises_on_all(ranks: Ranks) -> None:
    results = ranks.run(RANKS, clipping_that_raises)
    outside, not_finite, good = (list(outcomes) for outcomes in zip(*results, strict=True))
    assert_heard_everywhere(outside, {2: "IndexError"}, "index")
    for kind, text in not_finite:  # the norm is everybody's, and so is the flaw
        assert kind == "RuntimeError"
        assert "is nan, so it cannot be clipped" in text
    assert good == [("nothing", "")] * RANKS


# Refusals


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
        ShardedEmbeddingBag(ROWS, WIDTH, mode="median")


# Row surgery


def surgery(rank: int) -> None:
    for make in (rowstep.SparseAdam, rowstep.DeferredAdam):
        torch.manual_seed(0)
        table = ShardedEmbedding(ROWS, WIDTH)
        optimizer: Any = make(table.parameters())
        table(torch.arange(60)).sum().backward()
        optimizer.step()
        before, weight = table.full_weight(), table.weight
        for operate in (
            partial(optimizer.grow, weight, 2),
            partial(optimizer.keep_rows, weight, torch.arange(2)),
            partial(optimizer.permute_rows, weight, torch.arange(len(weight)).flip(0)),
        ):
            kind, text = outcome_of(operate)
            assert kind == "ValueError", kind
            assert f"{len(weight)} of the {ROWS} rows of a sharded table; expected an unsharded table" in text, text

        ids = torch.tensor([3, 50, 99])
        optimizer.reset_rows(weight, table.local_rows(ids))
        assert torch.equal(table.full_weight(), before)
        moments = optimizer.state_dict()["state"][0]["exp_avg"].full_tensor().flatten(1)
        known = torch.zeros(ROWS, dtype=torch.bool)
        known[table._shard.order.ids(torch.arange(ROWS))] = moments.ne(0).any(1)
        assert torch.equal(known.nonzero().view(-1), torch.tensor([id for id in range(60) if id not in (3, 50)]))
        kind, text = outcome_of(partial(table.local_rows, torch.tensor([ROWS])))
        assert kind == "IndexError"
        assert f"id {ROWS} is outside the table" in text


def test_rows_of_a_shard_can_be_reset_but_not_added_dropped_or_moved(ranks: Ranks) -> None:
    ranks.run(RANKS, surgery)

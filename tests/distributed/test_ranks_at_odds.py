"""Ranks that do different things: all of them raise and name the table, and none waits, aborts or mixes rows.

The helper that starts ranks says what went wrong on them, and ends them.
"""

from __future__ import annotations

import copy
import datetime
import multiprocessing
import os
import pickle
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import rowstep
from rowstep.distributed import PeerError, ShardedEmbedding, ShardedEmbeddingBag, ShardedEmbeddingCollection, ddp
from rowstep.distributed._traffic import count_traffic
from tests.helpers.ranks import RankError, Ranks

ROWS, WIDTH = 11, 4
IDS = torch.arange(5)


def message_of(action: Callable[[], Any]) -> str:
    try:
        action()
    except PeerError as raised:
        return str(raised)
    raise AssertionError("PeerError was not raised")


def works(table: ShardedEmbedding) -> None:
    """After all ranks have raised, they can go on."""
    table.zero_grad()
    table(IDS).sum().backward()
    assert table.weight.grad is not None


def other_tables(rank: int) -> None:
    tables = [ShardedEmbedding(ROWS, WIDTH) for _ in range(2)]
    message = message_of(lambda: tables[rank](IDS))
    said = "lookup of table 1 (table 1: 11 x 4, torch.float32, divided, gradient='mean', with"
    assert f"rank 0: {said} gradients); rank 1" in message
    with torch.set_grad_enabled(rank == 0):
        message = message_of(lambda: tables[0](IDS))
    assert f"'mean', with gradients); rank 1: {said}" in message
    tables[1].weight.requires_grad_(rank == 1)
    assert "ranks are out of sync" in message_of(lambda: tables[1](IDS))
    works(tables[0])


def other_dtypes(rank: int) -> None:
    torch.manual_seed(0)
    for make in (ShardedEmbedding, ShardedEmbeddingBag):
        table: Any = make(ROWS, WIDTH, dtype=(torch.float32, torch.float64)[rank])
        message = message_of(partial(table, IDS.view(1, -1)))
        assert re.search("rank 0: lookup of .*torch.float32.* rank 1: lookup of .*torch.float64", message)
    tables = ShardedEmbeddingCollection({"user": (ROWS, WIDTH), "item": (ROWS, WIDTH)})
    if rank == 0:
        tables["item"].half()
    message = message_of(lambda: tables({"user": IDS}))
    assert "table 'item': 11 x 4, torch.float16" in message
    assert "table 'user': " not in message, "of tables, only those that differ are told apart"


def other_options(rank: int) -> None:
    place = ("divided", "everywhere")[rank]
    others: list[tuple[dict[str, Any], list[str]]] = [
        ({"embedding_dim": WIDTH + rank}, ["11 x 4", "11 x 5"]),
        ({"gradient": ("sum", "mean")[rank]}, ["gradient='sum'", "gradient='mean'"]),
        ({"placement": place}, ["divided", "everywhere"]),
        ({"padding_idx": (0, 1)[rank]}, ["padding_idx=0", "padding_idx=1"]),
        ({"max_norm": (1.0, 2.0)[rank]}, ["max_norm=1.0, norm_type=2.0", "max_norm=2.0, norm_type=2.0"]),
    ]
    for options, said in others:
        table = ShardedEmbedding(ROWS, **{"embedding_dim": WIDTH, **options})
        first, second = message_of(partial(table, IDS)).split("; rank 1: ")
        assert said[0] in first
        assert said[1] in second
    bag = ShardedEmbeddingBag(ROWS, WIDTH, mode=("sum", "mean")[rank])
    assert "mode='sum', gradient='mean'" in message_of(partial(bag, IDS.view(1, -1)))
    sizes = {"user": (ROWS, WIDTH), "item": (ROWS + rank, WIDTH)}
    for item in ("divided", place):
        tables = ShardedEmbeddingCollection(sizes, plan={"user": "divided", "item": item})
        assert "ranks are out of sync" in message_of(partial(tables, {"user": IDS}))
        sizes["item"] = (ROWS, WIDTH)
    works(ShardedEmbedding(ROWS, WIDTH))


def look_up_a_copy(rank: int) -> None:
    torch.manual_seed(0)
    table = ShardedEmbedding(ROWS, WIDTH)
    for clone in (copy.deepcopy(table), copy.deepcopy(nn.Sequential(table))[0], copy.copy(table)):
        assert "table 1, copy" in message_of(lambda: (table, clone)[rank](IDS))  # noqa: B023  # called at once
        assert torch.equal(clone(IDS), table(IDS))
    again = copy.deepcopy(copy.deepcopy(table))
    assert "table 1, copy 4, copy 1" in message_of(lambda: (table, again)[rank](IDS))

    # A copy that one rank makes for itself is no matter to tables that are made later.
    if rank == 0:
        copy.deepcopy(table)
    works(ShardedEmbedding(ROWS, WIDTH))

    tables = ShardedEmbeddingCollection({"user": (ROWS, WIDTH), "item": (ROWS, WIDTH)})
    clones = copy.deepcopy(tables)
    assert "ranks are out of sync" in message_of(lambda: (tables, clones)[rank]({"user": IDS}))
    assert torch.equal(clones({"user": IDS})["user"], tables({"user": IDS})["user"])
    with torch.no_grad():
        clones["user"].weight.zero_()
    assert not clones({"user": IDS})["user"].any(), "the collection looks up the copies of its tables"
    assert tables({"user": IDS})["user"].any()


def test_tables_and_collections_can_be_pickled_in_one_process() -> None:
    tables = ShardedEmbeddingCollection({"user": (ROWS, WIDTH), "item": (ROWS, WIDTH)})
    before = tables({"user": IDS})["user"]
    again = pickle.loads(pickle.dumps(tables))
    assert torch.equal(again({"user": IDS})["user"], before)


def goes_on_to_the_next_step(rank: int) -> None:
    torch.manual_seed(0)
    tables = ShardedEmbeddingCollection({"user": (ROWS, WIDTH), "item": (ROWS, WIDTH)})
    dense = nn.Linear(WIDTH, 1)
    for make in (rowstep.SparseAdam, rowstep.DeferredAdam):
        optimizer: Any = make([*tables.parameters(), *dense.parameters()])
        read = tables({"user": IDS, "item": IDS})
        loss = dense(torch.ones(WIDTH)).sum() if rank == 1 else read["user"].sum()

        def step(loss: Any = loss, optimizer: Any = optimizer) -> None:
            loss.backward()
            optimizer.step()

        message, both = message_of(step), "table 'user', table 'item'"
        assert f"rank 0: backward pass of the lookup of {both}" in message
        assert f"rank 1: optimizer step, with no backward pass of the last lookup of {both}" in message
        assert f"rank 2: backward pass of the lookup of {both}" in message


def go_on_or_in_another_order(rank: int) -> None:
    tables = [ShardedEmbedding(ROWS, WIDTH) for _ in range(2)]
    first = tables[0](IDS).sum()
    message = message_of(lambda: tables[1](IDS) if rank == 1 else first.backward())
    assert "backward pass of the lookup of table 1" in message
    assert "rank 1: lookup of table 2" in message
    for table in tables:
        works(table)
    losses = [table(IDS).sum() for table in tables]
    assert "backward pass of the lookup of table 2" in message_of(losses[rank].backward)
    again = [tables[0](IDS).sum() for _ in range(2)]  # of one table, in two lookups
    assert "backward pass of the lookup of table 1" in message_of(again[rank].backward)


def wraps_again(rank: int) -> None:
    dense = nn.Linear(WIDTH, 1)
    one, other = (ShardedEmbedding(ROWS, WIDTH) for _ in range(2))
    wrapped = ddp(dense)
    read = [one(IDS), other(IDS)]
    assert "backward pass of the lookup of table 2" in message_of(wrapped(sum(read[: 1 + rank])).sum().backward)
    with pytest.raises(RuntimeError):
        torch.autograd.backward(wrapped(one(IDS)).sum())
    dist.barrier()
    del wrapped
    dense.zero_grad()
    wrapped = ddp(dense)
    torch.autograd.backward(wrapped(torch.full((3, WIDTH), 1.0 + rank)).sum())
    assert [param.grad.unique().tolist() for param in dense.parameters()] == [[4.5], [3.0]]  # type: ignore[union-attr]


def clips_instead(rank: int) -> None:
    table = ShardedEmbedding(ROWS, WIDTH)
    loss = table(IDS).sum()
    act = loss.backward if rank == 0 else lambda: rowstep.clip_grad_norm_(table.parameters(), 1.0)
    assert "backward pass of the lookup of table 1" in message_of(act)
    loss = table(IDS).sum()
    assert "gathering of table 1" in message_of(loss.backward if rank == 0 else table.full_weight)


def sums_of_different_things(rank: int) -> None:
    parts = [ShardedEmbedding(ROWS, WIDTH) for _ in range(2)]
    for part in parts:
        part(IDS).sum().backward()
    weights = [part.weight for part in parts]
    assert "clipping of gradients" in message_of(lambda: rowstep.clip_grad_norm_(weights[rank], 1.0))
    norm = (2.0, float("inf"))[rank]
    assert "clipping of gradients" in message_of(lambda: rowstep.clip_grad_norm_(weights, 1.0, norm_type=norm))
    lookup = partial(parts[0], IDS)
    assert "clipping" in message_of(lookup if rank else lambda: rowstep.clip_grad_norm_(weights, 1.0))


def other_copies(rank: int) -> None:
    torch.manual_seed(rank)
    tables = ShardedEmbeddingCollection({"user": (ROWS, WIDTH), "item": (5, WIDTH)}, plan={"item": "everywhere"})
    message = message_of(lambda: tables({"user": IDS}))
    assert "table 'item': 5 x 4, torch.float32, everywhere, gradient='mean', with gradients, rows with ch" in message
    tables.load_state_dict({"user.weight": torch.ones(ROWS, WIDTH), "item.weight": torch.ones(5, WIDTH)})
    assert tables({"user": IDS})["user"].eq(1).all()


def all_leave_it_out(rank: int) -> None:
    """Nothing is wrong if all ranks do: a forward pass with gradients for a look at the loss."""
    tables = [ShardedEmbedding(ROWS, WIDTH) for _ in range(2)]
    optimizer = rowstep.SparseAdam([table.weight for table in tables])
    for step in range(3):
        optimizer.zero_grad()
        tables[0](IDS).sum()
        with torch.no_grad():
            tables[1](IDS)
        tables[1](IDS).sum().backward()
        with count_traffic() as traffic:
            optimizer.step()
        assert sum(traffic.collectives.values()) == 1
        if step:
            tables[1](IDS).sum().backward()
            optimizer.step()


def never_comes(rank: int) -> str:
    """The group's time limit is how long ranks wait."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=2))
    table = ShardedEmbedding(ROWS, WIDTH, group=group)
    model = ddp(nn.Sequential(table, nn.Linear(WIDTH, 1)))
    loss = model(IDS).sum()
    if rank == 1:
        dist.monitored_barrier(timeout=datetime.timedelta(seconds=30))  # of the others, and it sends no rows
        return message_of(lambda: table(IDS))
    message = message_of(loss.backward)
    dist.monitored_barrier(timeout=datetime.timedelta(seconds=30))
    return message


def test_a_rank_that_never_comes_is_not_waited_for_longer_than_its_group_says(ranks: Ranks) -> None:
    waited, late = ranks.run(2, never_comes)
    assert "timed out waiting for other ranks, or lost them, in the backward pass of the lookup of table '0'" in waited
    assert "this rank made no backward pass of the last lookup of table '0'" in late


def uses_its_own_group(rank: int) -> None:
    """Programs send as well, and not always when a table does."""
    table = ShardedEmbedding(ROWS, WIDTH)
    number = torch.full((1000,), float(rank))
    if rank == 0:
        work = dist.all_reduce(number, async_op=True)
        read = table(IDS)
        work.wait()
    else:
        read = table(IDS)
        dist.all_reduce(number)
    assert number.eq(1).all()
    assert read.shape == (5, WIDTH)


PROGRAMS = [other_tables, other_dtypes, other_options, look_up_a_copy, goes_on_to_the_next_step, clips_instead]
PROGRAMS += [go_on_or_in_another_order, sums_of_different_things, other_copies, uses_its_own_group, all_leave_it_out]
PROGRAMS += [wraps_again]


@pytest.mark.parametrize("program", PROGRAMS)
def test_ranks_raise_together_or_go_on(ranks: Ranks, program: Callable[[int], None]) -> None:
    ranks.run(3 if program is goes_on_to_the_next_step else 2, program)


def test_a_rank_that_raises_or_dies_is_reported_and_leaves_no_process() -> None:
    before = set(multiprocessing.active_children())
    ranks = Ranks()
    try:
        with pytest.raises(RankError, match=r"(?s)rank 0:.*ZeroDivisionError"):
            ranks.run(1, divmod, 0)
        assert ranks.run(1, divmod, 2) == [(0, 0)]  # goes on: rank 0 divided by 2
        with pytest.raises(RankError, match="rank 0 of 1 exited unexpectedly"):
            ranks.run(1, os._exit)
        assert set(multiprocessing.active_children()) == before
    finally:
        ranks.close()

"""A second group of the same ranks: it needs no other rank, whatever groups the ranks have made before."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from rowstep.distributed import ddp
from rowstep.distributed._exchange import twin_group
from tests.helpers.ranks import Ranks, new_group_in_order


def sum_of_ranks(group: Any) -> int:
    total = torch.tensor(1 << dist.get_rank())
    dist.all_reduce(total, group=group)
    return int(total)


def mean_gradient(rank: int, group: Any = None) -> float:
    wrapped: Any = ddp(nn.Linear(1, 1, bias=False), process_group=group)
    torch.autograd.backward(wrapped(torch.tensor([[float(rank)]])).sum())
    return float(wrapped.module.weight.grad)


def after_a_group_of_two(rank: int, destroyed: bool) -> float:
    """Rank 2 is in fewer groups than the others, or rank 0 has one less left."""
    if destroyed:
        group = dist.new_group([0, 1])
        if rank == 0:
            dist.destroy_process_group(group)
    elif rank < 2:
        dist.new_group([0, 1], use_local_synchronization=True)
    return mean_gradient(rank)


@pytest.mark.parametrize("destroyed", [False, True])
def test_ranks_may_be_in_different_numbers_of_groups(ranks: Ranks, destroyed: bool) -> None:
    assert ranks.run(3, after_a_group_of_two, destroyed) == pytest.approx([1, 1, 1])


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


def test_twins_of_overlapping_groups_are_made_by_their_members(ranks: Ranks) -> None:
    ranks.run(4, twins_of_many)


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


def test_a_twin_has_the_order_and_the_timeout_of_its_group(ranks: Ranks) -> None:
    ranks.run(3, order_and_timeouts)

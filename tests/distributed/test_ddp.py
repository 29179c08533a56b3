"""DistributedDataParallel around models with tables, sharded and replicated: as one process with everybody's batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rowstep.distributed import ShardedEmbedding, ddp
from tests.helpers.gradients import same_bits
from tests.helpers.ranks import Ranks

WIDTH = 3
# In float32, sums in another order differ enough to turn the sign of a small gradient, and with it the step of Adam.
DTYPE = torch.float64


def ids_of(rank: int, step: int, rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(rows, (2 + rank, 4), generator=generator)


# Replicated tables


class Added(nn.Module):
    """Two tables whose outputs are added, so that their gradients share the memory of their values."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.users = nn.Embedding(11, WIDTH, sparse=True, dtype=DTYPE)
        self.items = nn.Embedding(11, WIDTH, sparse=True, dtype=DTYPE)

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = (self.users(ids) + self.items(ids.flip(0))).sin().sum()
        return loss


def gradients_of(module: Any) -> list[Tensor]:
    return [param.grad.to_dense() for param in module.parameters()]


def added_in_two_ways(rank: int) -> list[list[Tensor]]:
    ids = ids_of(rank, 0, 11)
    plain = DistributedDataParallel(Added())
    found = []
    for model in (plain, ddp(Added())):
        torch.autograd.backward(model(ids))
        found.append(gradients_of(model))
    return found


def mean_alone(model: nn.Module, step: int, ranks: int) -> list[Tensor]:
    for rank in range(ranks):
        torch.autograd.backward(model(ids_of(rank, step, 11)) / ranks)
    return gradients_of(model)


def test_tables_whose_outputs_are_added_are_divided_once(ranks: Ranks) -> None:
    expected = mean_alone(Added(), 0, 2)
    for torchs, ours in ranks.run(2, added_in_two_ways):
        # This is why there is a hook: once torch gets it right, this fails, and the hook has one reason less. The table
        # that comes last is divided twice; of the first it depends on which thread is faster.
        assert not all(torch.allclose(grad, mean) for grad, mean in zip(torchs, expected, strict=True))
        for grad, mean in zip(ours, expected, strict=True):
            torch.testing.assert_close(grad, mean, rtol=1e-12, atol=1e-15)


# Models without replicated tables


def what_ddp_is_told(rank: int) -> None:
    torch.manual_seed(2)
    # Dense layers step as under torch's own DDP.
    ours, torchs = (
        wrap(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).to(DTYPE))
        for wrap in (ddp, DistributedDataParallel)
    )
    torchs.load_state_dict(ours.state_dict())
    assert not ours.find_unused_parameters
    batch = torch.randn(3 + rank, 4, generator=torch.Generator().manual_seed(rank), dtype=DTYPE)
    for model in (ours, torchs):
        torch.autograd.backward(model(batch).sum())
    for param, expected in zip(ours.parameters(), torchs.parameters(), strict=True):
        assert param.grad is not None
        assert expected.grad is not None
        torch.testing.assert_close(param.grad, expected.grad, rtol=1e-12, atol=1e-14)  # x / 3 or x * (1 / 3)

    # Blocks of one shape on all ranks, which DDP would make copies of the first rank's.
    table = ShardedEmbedding(2 * dist.get_world_size(), WIDTH)
    before = table.full_weight()
    wrapped = ddp(nn.Sequential(table, nn.Linear(WIDTH, 1)))
    assert wrapped.parameters_to_ignore == {"0.weight", "0.rowstep_row_order"}
    torch.autograd.backward(wrapped(torch.tensor([rank])).sum())
    assert same_bits(table.full_weight(), before)
    assert len(torch.unique(before, dim=0)) == len(before)

    # The user's word is the last.
    assert ddp(Added()).find_unused_parameters
    assert not ddp(Added(), find_unused_parameters=False).find_unused_parameters


def test_sharded_tables_are_left_alone_and_dense_layers_are_torchs(ranks: Ranks) -> None:
    ranks.run(3, what_ddp_is_told)


def test_without_process_group_there_is_nothing_to_wrap_for() -> None:
    with pytest.raises(ValueError, match=r"torch\.distributed is not initialized; call"):
        ddp(Added())

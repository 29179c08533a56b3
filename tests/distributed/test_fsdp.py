"""Dense layers under FSDP2, whose gradients are DTensors, beside tables that are not: clipped as by one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import rowstep
import rowstep.distributed
from tests.helpers.ranks import Ranks


class Model(nn.Module):
    """Three layers with six gradients, and a table."""

    def __init__(self, table: nn.Module | None) -> None:
        super().__init__()
        self.table = table
        self.layers = nn.Sequential(*(nn.Linear(4, 4, dtype=torch.float64) for _ in range(3)))

    def forward(self, ids: Tensor) -> Tensor:
        rows = torch.ones(len(ids), 4, dtype=torch.float64) if self.table is None else self.table(ids)
        loss: Tensor = (100 * self.layers(rows)).square().sum()
        return loss


def model_with(table: str) -> Model:
    torch.manual_seed(0)
    plain = nn.Embedding(9, 4, sparse=True, dtype=torch.float64)
    model = Model(None if table == "none" else plain)
    if table == "sharded":
        model.table = rowstep.distributed.ShardedEmbedding.from_embedding(plain)
    return model


def full_gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, param in model.named_parameters():
        assert param.grad is not None
        found[name] = param.grad.full_tensor() if isinstance(param.grad, DTensor) else param.grad.to_dense()
    return found


def clip_sharded(rank: int, table: str, max_norm: float) -> tuple[Any, dict[str, Tensor]]:
    model = model_with(table)
    fully_shard(model.layers, mesh=init_device_mesh("cpu", (2,)))
    torch.autograd.backward(model(torch.tensor([1, 2, 2])))  # the same batch on every rank
    norm = rowstep.clip_grad_norm_(model.parameters(), max_norm)
    assert model.table is None or len(model.table.weight.grad._values()) <= 4  # type: ignore[union-attr,operator]
    grads = full_gradients(model)
    if table == "sharded":
        del grads["table.weight"]  # of which each rank has a part
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm), grads


@pytest.mark.parametrize(("table", "max_norm"), [("none", 0.01), ("plain", 0.01), ("sharded", 0.01), ("sharded", 1e9)])
def test_gradients_under_fsdp_are_clipped(ranks: Ranks, table: str, max_norm: float) -> None:
    alone = model_with("plain" if table == "sharded" else table)
    torch.autograd.backward(alone(torch.tensor([1, 2, 2])))
    norm = rowstep.clip_grad_norm_(alone.parameters(), max_norm)
    expected = full_gradients(alone)
    for found_norm, found in ranks.run(2, clip_sharded, table, max_norm):
        assert found_norm == pytest.approx(float(norm), rel=1e-12)
        for name, grad in found.items():
            torch.testing.assert_close(grad, expected[name], rtol=1e-12, atol=0)

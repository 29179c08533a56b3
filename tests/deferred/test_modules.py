"""Rows are up to date whenever a module reads them: every kind of lookup, and models of any shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.deferred_cases import BAR, Forward, Twins, bag, distance, embedding, in_memory, reading, zipf

pytestmark = pytest.mark.usefixtures("backend")


def ids(*shape: int) -> Tensor:
    """Zipf ids of the first 30 of 40 rows."""
    return zipf(30, torch.Size(shape).numel()).reshape(shape)


def plain() -> Forward:
    return reading(ids(5))


def matrix() -> Forward:
    return reading(ids(2, 3).to(torch.int32))


def by_keyword() -> Forward:
    batch = ids(2, 1, 2)
    return lambda model: model(input=batch)


def with_offsets() -> Forward:
    return reading(ids(6), torch.tensor([0, 2, 2, 5]))


def with_offsets_by_keyword() -> Forward:
    batch, offsets = ids(6), torch.tensor([0, 4])
    return lambda model: model(input=batch, offsets=offsets)


def weighted() -> Forward:
    batch, weights = ids(3, 2), torch.randn(3, 2, dtype=torch.float64)
    return lambda model: model(batch, per_sample_weights=weights)


LOOKUPS: list[tuple[Callable[[], nn.Module], Callable[[], Forward]]] = [
    (embedding, plain),
    (embedding, matrix),
    (embedding, by_keyword),
    (lambda: embedding(padding_idx=0), plain),
    (lambda: embedding(padding_idx=-1), plain),
    (lambda: embedding(max_norm=0.8), plain),
    (lambda: embedding(max_norm=0.8, norm_type=1.0, padding_idx=2), matrix),
    (lambda: bag(mode="sum"), matrix),
    (lambda: bag(mode="sum"), with_offsets),
    (lambda: bag(mode="mean", include_last_offset=True), with_offsets_by_keyword),
    (lambda: bag(mode="sum", padding_idx=1), with_offsets),
    (lambda: bag(mode="sum", max_norm=0.8), with_offsets),
    (lambda: bag(mode="sum"), weighted),
]


@pytest.mark.parametrize(("module", "lookup"), LOOKUPS)
def test_every_kind_of_lookup(module: Callable[[], nn.Module], lookup: Callable[[], Forward]) -> None:
    twins = Twins(module())
    for _ in range(40):
        twins.step(lookup())
    assert distance(in_memory(twins.model.weight), twins.twin.weight) > BAR  # rows wait
    twins.assert_same()


class Shop(nn.Module):
    """Tables and a network: users and items, items also as the history of a user, and a bias without a module."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.ModuleDict({"id": embedding(30, 4)})
        self.items = nn.Sequential(embedding(50, 4), nn.Linear(4, 4, dtype=torch.float64))
        self.history = bag(50, 4, mode="mean")
        self.history.weight = self.items[0].weight  # type: ignore[assignment]
        self.bias = nn.Parameter(torch.zeros(4, dtype=torch.float64))

    def forward(self, users: Tensor, items: Tensor, history: Tensor) -> Any:
        user = self.users["id"](users) + self.history(history) + self.bias
        return torch.stack([(user * self.items(items)).sum(-1), (user * self.items[0](items.flip(0))).sum(-1)])


def test_nested_modules_that_share_a_weight_and_several_lookups() -> None:
    twins = Twins(Shop())
    for _ in range(60):
        twins.step(reading(zipf(30, 4), zipf(50, 4), zipf(50, 8).reshape(4, 2)))
    twins.assert_same()

"""Rows are up to date whenever a module reads them: every kind of lookup, models of any shape, odd gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from rowstep import DeferredAdam
from tests.helpers.deferred_cases import (
    BAR,
    Twins,
    assert_same_parameter,
    bag,
    distance,
    embedding,
    in_memory,
    optimizers,
    reading,
    zipf,
)
from tests.helpers.gradients import copy_of, sparse, step_with, table

pytestmark = pytest.mark.usefixtures("backend")


def ids(*shape: int) -> Tensor:
    """Zipf ids of the first 30 of 40 rows."""
    return zipf(30, torch.Size(shape).numel()).reshape(shape)


def offsets(*starts: int) -> Tensor:
    return torch.tensor(starts)


LOOKUPS: list[tuple[Callable[[], nn.Module], Callable[[Any], Any]]] = [
    (embedding, lambda model: model(ids(5))),
    (embedding, lambda model: model(ids(2, 3).to(torch.int32))),
    (embedding, lambda model: model(input=ids(2, 1, 2))),
    (lambda: embedding(padding_idx=0), lambda model: model(ids(5))),
    (lambda: embedding(padding_idx=-1), lambda model: model(ids(5))),
    (lambda: embedding(max_norm=0.8), lambda model: model(ids(5))),
    (lambda: embedding(max_norm=0.8, norm_type=1.0, padding_idx=2), lambda model: model(ids(2, 3))),
    (lambda: bag(mode="sum"), lambda model: model(ids(2, 3))),
    (lambda: bag(mode="sum"), lambda model: model(ids(6), offsets(0, 2, 2, 5))),
    (
        lambda: bag(mode="mean", include_last_offset=True),
        lambda model: model(input=ids(6), offsets=offsets(0, 4)),
    ),
    (lambda: bag(mode="sum", padding_idx=1), lambda model: model(ids(6), offsets(0, 2, 2, 5))),
    (lambda: bag(mode="sum", max_norm=0.8), lambda model: model(ids(6), offsets(0, 2, 2, 5))),
    (
        lambda: bag(mode="sum"),
        lambda model: model(ids(3, 2), per_sample_weights=torch.randn(3, 2, dtype=torch.float64)),
    ),
]


@pytest.mark.parametrize(("module", "lookup"), LOOKUPS)
def test_every_kind_of_lookup(module: Callable[[], nn.Module], lookup: Callable[[Any], Any]) -> None:
    twins = Twins(module())
    for seed in range(40):

        def forward(model: Any, seed: int = seed) -> Any:
            torch.manual_seed(seed)  # the same ids for both
            return lookup(model)

        twins.step(forward)
    assert distance(in_memory(twins.model.weight), twins.twin.weight) > BAR  # rows wait
    twins.assert_same()


def linear_of_bags(one: Tensor, other: Tensor) -> Tensor:
    return functional.linear(functional.embedding(IDS, one), other)


def functional_bags(one: Tensor, other: Tensor) -> Any:
    return torch.func.functional_call(bag(mode="sum"), {"weight": one}, (IDS,), {"per_sample_weights": other})


def gradient(one: Tensor, other: Tensor) -> Tensor:
    with torch.no_grad():
        one.grad = other
    with torch._C.DisableTorchFunctionSubclass():  # as a step reads it
        return one.grad.clone()


def memory(one: Tensor, other: Tensor) -> Tensor:
    one.requires_grad_(False).set_(other.requires_grad_(False))  # type: ignore[call-overload]
    return in_memory(one)


IDS = torch.arange(40 * 3).reshape(40, 3) % 5
PLAIN = torch.ones(40, 3, dtype=torch.float64)

TAKING_TWO: dict[str, Callable[[Any, Any], Any]] = {
    "by name": lambda one, other: functional.embedding_bag(IDS, one, per_sample_weights=other, mode="sum"),
    "by place": lambda one, other: functional.embedding_bag(IDS, one, None, None, 2.0, False, "sum", False, other),
    "all by name": lambda one, other: functional.embedding_bag(
        weight=one, per_sample_weights=other, mode="sum", input=IDS
    ),
    "with max_norm": lambda one, other: functional.embedding_bag(
        IDS, one, max_norm=0.5, per_sample_weights=other, mode="sum"
    ),
    "factors alone": lambda one, other: functional.embedding_bag(IDS, PLAIN, per_sample_weights=other, mode="sum"),
    "one as both": lambda one, other: functional.embedding_bag(IDS, one, per_sample_weights=one, mode="sum"),
    "functional_call": functional_bags,
    "nested": linear_of_bags,
    "in a list": lambda one, other: torch.cat([PLAIN, one, other]),
    "in a list by name": lambda one, other: torch.cat(tensors=(PLAIN, other)),
    "foreach": lambda one, other: torch._foreach_mul([PLAIN, one], [other, other])[1],
    "written to another": lambda one, other: PLAIN.index_put((torch.arange(40),), other),
    "as a gradient": gradient,
    "as memory": memory,
}


@pytest.mark.parametrize("call", TAKING_TWO)
def test_every_argument_that_waits_is_brought_up_to_date(call: str) -> None:
    twins = Twins(nn.ModuleList([embedding(), embedding()]))
    for count in (40, 5, 5, 5):

        def forward(model: Any, count: int = count) -> Tensor:
            return torch.cat([table(torch.arange(count)) for table in model])

        twins.step(forward)
    ours, theirs = ([table.weight for table in model] for model in (twins.model, twins.twin))
    assert distance(in_memory(ours[1]), theirs[1]) > BAR  # rows wait
    assert distance(TAKING_TWO[call](*ours), TAKING_TWO[call](*theirs)) <= BAR
    if call == "by name":
        assert distance(in_memory(ours[0]), theirs[0]) > BAR  # only the rows looked up were caught up


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


def test_a_parameter_without_dimensions() -> None:
    param = table(dtype=torch.float64)
    twin = copy_of(param)
    ours, theirs = optimizers([param], [twin], weight_decay=0.1, lr=0.01)
    for value in (1.0, -2.0, 0.5):
        grad = sparse(torch.empty(0, 1, dtype=torch.int64), torch.tensor([value], dtype=torch.float64), ())
        step_with(ours, param, grad)
        step_with(theirs, twin, torch.tensor(value, dtype=torch.float64))
    ours.flush()
    assert_same_parameter(ours, param, theirs, twin)


@pytest.mark.parametrize("sparse_dim", [0, 1, 2])
def test_sixteen_bit_duplicates_are_summed_in_float32(sparse_dim: int) -> None:
    param = nn.Parameter(torch.zeros(3, 2, dtype=torch.bfloat16))
    optimizer = DeferredAdam([param], betas=(0.0, 0.5))  # the first moment is then the summed gradient
    indices = torch.ones(2, 1000, dtype=torch.int64)[:sparse_dim]
    values = torch.ones(1000, *param.shape[sparse_dim:], dtype=torch.bfloat16)
    step_with(optimizer, param, sparse(indices, values, param.shape))
    assert optimizer.state[param]["exp_avg"][1, 1] == 1000


@pytest.mark.parametrize("sparse_dim", [0, 1, 2])
def test_duplicates_are_summed_as_widely_as_the_state(sparse_dim: int) -> None:
    """A float32 gradient of a table that was float64: 1e8 + 1 - 1e8 is 0 in float32."""
    param = table(1, 1)
    param.data.zero_()
    optimizer = DeferredAdam([param], lr=0.1)
    optimizer.state[param] = {key: torch.zeros(1, 1, dtype=torch.float64) for key in ("exp_avg", "exp_avg_sq")}
    optimizer.state[param]["step"] = 0
    values = torch.tensor([1e8, 1.0, -1e8]).reshape(3, *[1] * (2 - sparse_dim))
    step_with(optimizer, param, sparse(torch.zeros(sparse_dim, 3, dtype=torch.int64), values, (1, 1)))
    assert param.item() == pytest.approx(-0.1)


def test_a_single_entry_whose_values_are_a_part_of_wider_ones() -> None:
    """torch's to_dense adds as many numbers as the entry's stride says, beyond the end of the table."""
    param, twin = (nn.Parameter(torch.zeros(7, dtype=torch.float64)) for _ in range(2))
    values = torch.arange(1 << 16, dtype=torch.float64).unsqueeze(0)[:, :7]
    step_with(DeferredAdam([param]), param, sparse(torch.zeros(0, 1, dtype=torch.int64), values, (7,)))
    step_with(torch.optim.Adam([twin]), twin, values[0].clone())
    assert torch.allclose(param, twin)

"""A host table on the CPU gives what torch's modules with sparse gradients give, and trains like them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rowstep import DeferredAdam, DeferredAdamW, HostEmbedding, SparseAdam, clip_grad_norm_

ROWS, DIM = 30, 6
DTYPES = [torch.float32, torch.float64, torch.bfloat16]
TWICE = torch.tensor([[3, 7, 29], [7, 0, 3], [11, 12, 29]])
"""No id more than twice: sums of two gradients are the same in any order."""
OFTEN = torch.randint(0, ROWS, (20, 10), generator=torch.Generator().manual_seed(1))


def pair(mode: Any = None, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[HostEmbedding, Any]:
    """A host table, and torch's module with the same weights; sparse if torch can."""
    sparse = mode != "max" and not options.get("scale_grad_by_freq")
    if mode is None:
        torchs: Any = nn.Embedding(ROWS, DIM, sparse=sparse, dtype=dtype, **options)
    else:
        torchs = nn.EmbeddingBag(ROWS, DIM, mode=mode, sparse=sparse, dtype=dtype, **options)
    ours = HostEmbedding(ROWS, DIM, mode=mode, dtype=dtype, **options)
    ours.load_state_dict(torchs.state_dict())
    return ours, torchs


def factors_like(found: Tensor) -> Tensor:
    """What to multiply a result by for a loss in which every number has another gradient."""
    return torch.randn(found.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).to(found.dtype)


def gradients(ours: HostEmbedding, torchs: nn.Module, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    for table in (ours, torchs):
        found = table(*args, **options)
        (found * factors_like(found)).sum().backward()
    assert isinstance(torchs.weight.grad, Tensor)
    assert ours.weight.grad is not None
    return ours.weight.grad, torchs.weight.grad


def assert_same(one: Tensor, other: Tensor) -> None:
    """Same bits, and the same rows in both if both are sparse."""
    if one.is_sparse and other.is_sparse:
        one, other = one.coalesce(), other.coalesce()
        assert torch.equal(one.indices(), other.indices())
    assert torch.equal(*(each.to_dense() if each.is_sparse else each for each in (one, other)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "ids",
    [TWICE, TWICE.int(), TWICE[0], TWICE[0, 1], TWICE.t(), TWICE[:0]],
    ids=["2-D", "int32", "1-D", "0-D", "transposed", "none"],
)
def test_rows_and_their_gradient(ids: Tensor, dtype: torch.dtype) -> None:
    ours, torchs = pair(dtype=dtype)
    assert torch.equal(ours(ids), torchs(ids))
    one, other = gradients(ours, torchs, ids)
    assert_same(one, other)
    assert one.is_sparse
    assert one._nnz() == len(torch.unique(ids))


OPTIONS: list[dict[str, Any]] = [
    {"padding_idx": 3},
    {"padding_idx": -1},
    {"padding_idx": 20},
    {"max_norm": 1.0},
    {"max_norm": 2.0, "norm_type": 1.0, "padding_idx": 0},
    {"scale_grad_by_freq": True},
    {"scale_grad_by_freq": True, "padding_idx": 29},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_of_an_embedding(options: dict[str, Any], dtype: torch.dtype) -> None:
    ours, torchs = pair(dtype=dtype, **options)
    assert torch.equal(ours(TWICE), torchs(TWICE))
    assert_same(*gradients(ours, torchs, TWICE))
    assert torch.equal(ours.weight, torchs.weight)
    if (padding := ours.padding_idx) is not None:
        assert ours.weight.grad is not None
        assert padding not in ours.weight.grad.coalesce().indices()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("options", [{}, {"padding_idx": 7}, {"include_last_offset": True}], ids=str)
def test_bags(mode: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    ours, torchs = pair(mode, dtype, **options)
    last = [9] if options.get("include_last_offset") else []
    offsets = torch.tensor([0, 2, 2, 5, *last])
    for args in [(TWICE,), (TWICE.view(-1), offsets), (TWICE.view(-1).int(), offsets)]:
        assert torch.equal(ours(*args), torchs(*args))
        ours.zero_grad()
        torchs.zero_grad()
        one, other = gradients(ours, torchs, *args)
        if mode == "mean":  # torch divides before it sums where gradients are sparse, and multiplies where they are not
            torch.testing.assert_close(one.to_dense(), other.to_dense())
        else:
            assert_same(one, other)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_16_bit_bags_are_those_of_float32_rounded_once(mode: str) -> None:
    ours, torchs = pair(mode, torch.bfloat16)
    torchs.float()
    found, expected = ours(OFTEN), torchs(OFTEN).to(torch.bfloat16)
    assert torch.equal(found, expected)
    for each in (found, expected):
        (each * factors_like(each)).sum().backward()
    assert ours.weight.grad is not None
    torch.testing.assert_close(ours.weight.grad.to_dense(), torchs.weight.grad.to_dense().to(torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_weights_for_each_id_and_their_gradient(dtype: torch.dtype) -> None:
    ours, torchs = pair("sum", dtype)
    weights = [torch.rand(3, 3, dtype=dtype, generator=torch.Generator().manual_seed(3)) for _ in range(2)]
    for table, each in zip((ours, torchs), weights, strict=True):
        each.requires_grad_()
        found = table(TWICE, per_sample_weights=each)
        (found * factors_like(found)).sum().backward()
    one, other = (each.grad for each in weights)
    assert one is not None
    torch.testing.assert_close(one, other)
    torch.testing.assert_close(ours.weight.grad.to_dense(), torchs.weight.grad.to_dense())  # type: ignore[union-attr]


def test_frequencies_scale_the_gradient_of_bags() -> None:
    ours, torchs = pair("sum", torch.float64, scale_grad_by_freq=True)
    one, other = gradients(ours, torchs, OFTEN)
    torch.testing.assert_close(one.to_dense(), other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mode", [None, "sum", "mean", "max"])
def test_sums_of_many_gradients(mode: str | None) -> None:
    one, other = gradients(*pair(mode, torch.float64), OFTEN)
    torch.testing.assert_close(one.to_dense(), other.to_dense(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mode", [None, "sum"])
def test_many_16_bit_gradients_are_summed_without_loss(mode: Any) -> None:
    table = HostEmbedding(4, 2, dtype=torch.bfloat16, mode=mode)
    table(torch.full((100, 10), 3)).sum().backward()
    assert table.weight.grad is not None
    assert table.weight.grad.to_dense()[3].tolist() == [1000, 1000]  # torch's sum is 256


# Training


def train(table: Any, optimizer: Any, *, lookups: int = 1, accumulate: int = 1, clip: float | None = None) -> None:
    draw = torch.Generator().manual_seed(4)
    for _ in range(50):
        optimizer.zero_grad()
        for _ in range(accumulate):
            batches = [torch.randint(0, ROWS, (8,), generator=draw) for _ in range(lookups)]
            loss = sum(((table(ids) - 1) ** 2).sum() for ids in batches)
            loss.backward()
        if clip is not None:
            clip_grad_norm_(table.parameters(), clip)
        optimizer.step()


OPTIMIZERS: list[Callable[[Any], Any]] = [SparseAdam, DeferredAdam, DeferredAdamW]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    "how", [{}, {"lookups": 2}, {"accumulate": 3}, {"clip": 0.5}, {"lookups": 2, "accumulate": 2, "clip": 0.5}], ids=str
)
def test_training(optimizer: Callable[[Any], Any], how: dict[str, Any], backend: str) -> None:
    tables = pair(dtype=torch.float64, padding_idx=2)
    for table in tables:
        train(table, optimizer(table.parameters()), **how)
    ours, torchs = tables
    torch.testing.assert_close(ours.weight, torchs.weight, rtol=1e-12, atol=1e-12)
    assert not torch.equal(ours.weight[3], torch.zeros(DIM))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_has_the_same_bits(optimizer: Callable[[Any], Any], dtype: torch.dtype) -> None:
    times = 1 if dtype is torch.bfloat16 else 2  # the optimizer would get a sum in float32 from torch's module
    tables = pair(dtype=dtype)
    for table in tables:
        steps, draw = optimizer(table.parameters()), torch.Generator().manual_seed(5)
        for _ in range(50):
            steps.zero_grad()
            ids = torch.randperm(ROWS, generator=draw)[:8]
            found = table(ids.repeat(times))
            (found * factors_like(found)).sum().backward()
            steps.step()
    assert torch.equal(*(table.weight for table in tables))


def test_frozen_tables_and_no_grad() -> None:
    ours, torchs = pair()
    with torch.no_grad():
        assert not ours(TWICE).requires_grad
    ours.requires_grad_(requires_grad=False)
    assert torch.equal(ours(TWICE), torchs(TWICE))
    assert not ours(TWICE).requires_grad


def test_a_gradient_lies_beside_the_table_whatever_the_default_device_is() -> None:
    ours, torchs = pair()
    torch.set_default_device("meta")
    try:
        ours(TWICE).sum().backward()
    finally:
        torch.set_default_device(None)
    torchs(TWICE).sum().backward()
    torch.testing.assert_close(ours.weight.grad.to_dense(), torchs.weight.grad.to_dense())  # type: ignore[union-attr]


def test_a_second_derivative() -> None:
    ours, torchs = pair(dtype=torch.float64)
    second = []
    for table in (ours, torchs):
        (first,) = torch.autograd.grad((table(TWICE) ** 3).sum(), table.weight, create_graph=True)
        (each,) = torch.autograd.grad((first.to_dense() ** 2).sum(), table.weight)
        second.append(each.to_dense())
    torch.testing.assert_close(*second)
    assert second[0].any()


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # of torch's compiler, about any graph break
def test_compiled_code_around_a_lookup() -> None:
    ours, torchs = pair()
    compiled = torch.compile(lambda ids: ours(ids * 1).sin() * 2, backend="eager")
    found = compiled(TWICE)
    assert torch.equal(found, torchs(TWICE).sin() * 2)
    found.sum().backward()
    (torchs(TWICE).sin() * 2).sum().backward()
    assert ours.weight.grad is not None
    assert_same(ours.weight.grad, torchs.weight.grad)

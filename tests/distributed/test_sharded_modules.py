"""Sharded tables as modules: what torch.nn.Embedding and EmbeddingBag read and differentiate, they do too."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import rowstep
from rowstep._part import ROW_ORDER, part_of
from rowstep.distributed import ShardedEmbedding, ShardedEmbeddingBag
from tests.helpers.gradients import same_bits
from tests.helpers.ranks import Ranks

ROWS, WIDTH = 103, 3

Plain = nn.Embedding | nn.EmbeddingBag


def shard(plain: Plain, **options: Any) -> Any:
    if isinstance(plain, nn.Embedding):
        return ShardedEmbedding.from_embedding(plain, **options)
    return ShardedEmbeddingBag.from_embedding(plain, **options)


def full_gradient(table: Any) -> Tensor:
    """The gradient of the whole table by id, from the blocks of all ranks."""
    full: Tensor = table.weight.new_zeros(table.num_embeddings, table.embedding_dim, dtype=torch.float64)
    owned = table._shard.positions
    assert table.weight.grad.is_sparse
    assert table.weight.grad.shape == (len(owned), table.embedding_dim)
    full[table._shard.order.ids(torch.arange(owned.start, owned.stop))] = table.weight.grad.double().to_dense()
    if table.group is not None:
        dist.all_reduce(full, group=table.group)
    return full


class Case(NamedTuple):
    """A plain table, and what a rank reads of it."""

    make: Callable[[], Plain]
    read: Callable[[Any, int], Tensor]


def some_ids(rank: int, *shape: int, rows: int = ROWS, dtype: torch.dtype = torch.int64) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return (torch.randint(rows, shape, generator=generator) ** 2 // rows).to(dtype)


def cases() -> Iterator[Case]:
    """Everything that the two modules take. Every rank reads ids of its own, of shapes of its own."""
    embedding = partial(nn.Embedding, sparse=True)
    for shape in [(), (2, 3, 4), (2, 0, 4)]:
        yield Case(lambda: embedding(ROWS, WIDTH), lambda t, r, s=shape: t(some_ids(r, *s)))  # type: ignore[misc]
    yield Case(lambda: embedding(ROWS, WIDTH), lambda t, r: t(some_ids(r, 6 if r == 2 else 0)))
    yield Case(lambda: embedding(90_001, 1), lambda t, r: t(some_ids(r, 60, rows=90_001, dtype=torch.int32)))
    yield Case(lambda: embedding(ROWS, WIDTH), lambda t, r: t(some_ids(r, 8, 8).t()[::2]))  # not contiguous
    yield Case(lambda: embedding(5, WIDTH), lambda t, r: t(some_ids(r, 9, rows=5)))  # of 4 ranks the last has no row
    yield Case(lambda: embedding(1, WIDTH), lambda t, r: t(some_ids(r, 3, rows=1)))
    yield Case(lambda: embedding(0, WIDTH), lambda t, r: t(torch.empty(0, dtype=torch.int64)))
    for padding in (4, -ROWS):
        yield Case(
            lambda p=padding: embedding(ROWS, WIDTH, padding_idx=p),  # type: ignore[misc]
            lambda t, r, p=padding: t(torch.cat([some_ids(r, 9), torch.tensor([p % ROWS, 7])])),  # type: ignore[misc]
        )
    yield Case(lambda: embedding(ROWS, WIDTH, 2, 0.7, 1.0), lambda t, r: t(some_ids(r, 9)))
    yield Case(lambda: embedding(ROWS, WIDTH), several_lookups)
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        yield Case(lambda d=dtype: embedding(ROWS, WIDTH, dtype=d), lambda t, r: t(some_ids(r, 30)))  # type: ignore[misc]
    yield from bag_cases()


def several_lookups(table: Any, rank: int) -> Tensor:
    """Of which each backward pass needs the others' gradients, and one is of no account on some ranks."""
    first, second = table(some_ids(rank, 6)), table(some_ids(rank + 10, 6))
    third: Tensor = table(some_ids(rank + 20, 6)) * (rank % 2)
    read: Tensor = first * second + third.sin()
    return read


def bag_cases() -> Iterator[Case]:
    def bag(mode: str, rows: int = ROWS, **options: Any) -> nn.EmbeddingBag:
        return nn.EmbeddingBag(rows, WIDTH, mode=mode, sparse=mode != "max", **options)

    def ends(rank: int) -> Tensor:
        return torch.tensor([0, 2, 2, 5, 8 + rank])

    for mode in ("sum", "mean", "max"):
        make = partial(bag, mode)
        yield Case(make, lambda t, r: t(some_ids(r, 4, 3)))
        yield Case(make, lambda t, r: t(some_ids(r, 8 + r), ends(r)))  # the last bag is empty
        yield Case(partial(make, include_last_offset=True), lambda t, r: t(some_ids(r, 8 + r), ends(r)))
        yield Case(make, lambda t, r: t(some_ids(r, 0), torch.empty(0, dtype=torch.int64)))  # nor is there a bag
        yield Case(partial(make, 5), lambda t, r: t(some_ids(r, 4 * (r % 2), 3, rows=5)))
        yield Case(partial(make, padding_idx=1), lambda t, r: t(torch.arange(12).view(4, 3) // 2))
        yield Case(partial(make, padding_idx=-ROWS), lambda t, r: t(torch.full((2, 3), r % 2)))  # nothing else
        yield Case(partial(make, dtype=torch.bfloat16), lambda t, r: t(some_ids(r, 4, 3)))
    yield Case(partial(bag, "sum", max_norm=0.7), lambda t, r: t(some_ids(r, 4, 3)))
    yield Case(partial(bag, "mean", max_norm=0.7, norm_type=1.0), lambda t, r: t(some_ids(r, 4, 3)))


def assert_reads_as_torch(rank: int, ranks: int, case: Case, gradient: str) -> None:
    torch.manual_seed(5)
    plain = case.make()
    table = shard(plain, gradient=gradient)
    expected_gradient = torch.zeros(plain.weight.shape, dtype=torch.float64)
    precise = plain.weight.dtype.itemsize > 2
    # Gradients of two backward passes add up, except for float16, of which torch has no sum of sparse tensors.
    for _ in range(1 if plain.weight.dtype == torch.float16 else 2):
        read = case.read(table, rank)
        torch.autograd.backward(read.sin().sum())
        for other in range(ranks):
            expected = case.read(plain, other)
            plain.weight.grad = None
            torch.autograd.backward(expected.sin().sum())
            assert plain.weight.grad is not None
            expected_gradient += plain.weight.grad.to_dense()
            if other == rank:
                # A bag's sum of 12 rows or fewer, in another order: 12 roundings of up to 12 times 6e-8.
                torch.testing.assert_close(read, expected, rtol=1e-5 if precise else 1e-2, atol=1e-5)
    if gradient == "mean":
        expected_gradient /= ranks
    error = 1e-5 if precise else 0.03
    torch.testing.assert_close(full_gradient(table), expected_gradient, rtol=error, atol=error)
    assert same_bits(table.full_weight(), plain.weight)  # after what max_norm has done to it
    if table.padding_idx is not None:
        assert not full_gradient(table)[table.padding_idx].any()


def read_all_cases(rank: int, ranks: int) -> None:
    for count, case in enumerate(cases(), 1):
        try:
            assert_reads_as_torch(rank, ranks, case, gradient="sum" if count % 2 else "mean")
        except Exception as error:
            raise AssertionError(f"case {count}: {case.make()}") from error


def test_reads_and_gradients_are_torchs(ranks: Ranks) -> None:
    ranks.run(4, read_all_cases, 4)


def test_without_process_group_a_sharded_table_is_a_plain_one() -> None:
    read_all_cases(0, 1)
    table = ShardedEmbedding(10, 2)
    assert (table.group, table.rank, table.ranks, len(table.weight)) == (None, 0, 1, 10)


def weighted_bags(rank: int) -> None:
    for offsets in (None, torch.tensor([0, 3, 3, 7])):
        torch.manual_seed(1)
        plain = nn.EmbeddingBag(ROWS, WIDTH, mode="sum", padding_idx=2, sparse=True, dtype=torch.float64)
        table = shard(plain)
        ids = some_ids(rank, 12) if offsets is not None else some_ids(rank, 4, 3)
        ids[:1] = 2  # the padding row has no part in the gradient of its weight
        weights = [torch.rand(ids.shape, dtype=torch.float64).requires_grad_() for _ in range(2)]
        with torch.no_grad():
            weights[1].copy_(weights[0])
        # torch has no gradient of the weights where that of the rows is sparse
        dense = nn.EmbeddingBag.from_pretrained(plain.weight.detach(), freeze=False, mode="sum", padding_idx=2)
        expected = dense(ids, offsets, per_sample_weights=weights[1])
        read = table(ids, offsets, per_sample_weights=weights[0])
        torch.testing.assert_close(read, expected)
        read.sin().sum().backward()
        expected.sin().sum().backward()
        torch.testing.assert_close(weights[0].grad, weights[1].grad)
        assert dense.weight.grad is not None
        dist.all_reduce(dense.weight.grad)
        torch.testing.assert_close(full_gradient(table), dense.weight.grad / dist.get_world_size())


def lookups_without_gradients(rank: int) -> None:
    """In every way that torch has to say so; rows that wait are brought up to date all the same."""
    torch.manual_seed(1)
    plain = nn.Embedding(ROWS, WIDTH, sparse=True)
    table = shard(plain)
    everything = torch.arange(ROWS)
    optimizers = [rowstep.DeferredAdam(module, lr=0.1) for module in (plain, table)]
    for step in range(3):
        for module, optimizer in zip((plain, table), optimizers, strict=True):
            module(everything[step : 40 + step]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    again = shard(plain)  # before anything has read all of it
    torch.testing.assert_close(table.to_embedding().weight, again.full_weight())
    with torch.no_grad():
        read = table(everything)
    assert not read.requires_grad
    torch.testing.assert_close(read, plain(everything).detach())
    table(everything[50:]).sum().backward()  # and training goes on
    optimizers[1].step()

    frozen = shard(nn.Embedding(ROWS, WIDTH, sparse=True, _weight=plain.weight.detach(), _freeze=True))
    assert not frozen.weight.requires_grad
    assert not frozen(everything).requires_grad
    assert same_bits(frozen(everything), plain.weight)
    assert not frozen.to_embedding().weight.requires_grad
    bag = shard(nn.EmbeddingBag.from_pretrained(plain.weight.detach(), freeze=True, sparse=True))
    assert not bag.to_embedding().weight.requires_grad


def there_and_back(rank: int) -> None:
    embeddings: list[Plain] = [
        nn.Embedding(ROWS, WIDTH, 5, 0.9, 1.0, sparse=True, dtype=torch.float64),
        nn.EmbeddingBag(ROWS, WIDTH, 0.9, 1.0, mode="max", include_last_offset=True, padding_idx=4),
        nn.EmbeddingBag(5, WIDTH, mode="sum", sparse=True, dtype=torch.bfloat16),
    ]
    for plain in embeddings:
        dist.broadcast(plain.weight.detach(), 0)
        back = shard(plain).to_embedding()
        assert type(back) is type(plain)
        assert str(back).replace(", sparse=True", "") == str(plain).replace(", sparse=True", "")
        assert same_bits(back.weight, plain.weight)
        assert back.weight.requires_grad
        assert back.weight.data_ptr() != plain.weight.data_ptr()
        assert torch.equal(back(torch.arange(4).view(2, 2)), plain(torch.arange(4).view(2, 2))) or plain.max_norm


def copies(rank: int) -> None:
    for make in (rowstep.SparseAdam, rowstep.DeferredAdam):
        torch.manual_seed(4)
        model: Any = nn.Sequential(ShardedEmbedding(ROWS, WIDTH), nn.Linear(WIDTH, 1))
        optimizer: Any = make(model.parameters(), lr=0.05)
        for _ in range(3):
            model(some_ids(rank, 9)).sum().backward()
            optimizer.step()
        twin, its_optimizer = copy.deepcopy((model, optimizer))
        alone = copy.deepcopy(model)
        for module, other in ((twin, its_optimizer), (alone, rowstep.SparseAdam(alone.parameters()))):
            moments = other.state_dict()["state"][0]
            values = (moments["exp_avg"], moments["exp_avg_sq"], module.state_dict()["0.weight"])
            assert all(isinstance(value, DTensor) and value.shape == (ROWS, WIDTH, 1) for value in values)
            assert same_bits(module[0].full_weight(), model[0].full_weight())
            assert module[0].group is model[0].group
        before = model[0].full_weight()
        torch.autograd.backward(twin(some_ids(rank, 9)).sum())
        its_optimizer.step()
        assert not torch.equal(twin[0].full_weight(), before)
        assert same_bits(model[0].full_weight(), before)
    table = ShardedEmbedding(ROWS, WIDTH).double()
    assert isinstance(table.state_dict()["weight"], DTensor)
    assert table(torch.arange(3)).dtype == torch.float64
    with torch.device("meta"):
        assert ShardedEmbedding(ROWS, WIDTH).weight.is_meta


@pytest.mark.parametrize("program", [weighted_bags, lookups_without_gradients, there_and_back, copies])
def test_tables_are_modules_as_any_other(ranks: Ranks, program: Callable[[int], None]) -> None:
    ranks.run(3, program)


def test_a_weight_stays_a_part_of_its_table_whatever_becomes_of_it() -> None:
    table = ShardedEmbedding(ROWS, WIDTH, device="meta").to_empty(device="cpu")
    assert part_of(table.weight) is not None
    table.weight = nn.Parameter(torch.zeros(ROWS, WIDTH))
    assert part_of(table.weight) is not None
    with mock.patch.object(torch.__future__, "_overwrite_module_params_on_conversion", True):
        table.double()
    assert table.weight.dtype == torch.float64
    assert part_of(table.weight) is not None
    table.load_state_dict(nn.Embedding(ROWS, WIDTH, dtype=torch.float64).state_dict(), assign=True)
    assert part_of(table.weight) is not None

    # What is frozen has no state, and what was not loaded has one.
    model = nn.Sequential(ShardedEmbedding(ROWS, WIDTH).requires_grad_(False), ShardedEmbedding(ROWS, WIDTH))
    optimizer = rowstep.SparseAdam(model.parameters())
    assert list(optimizer.state_dict()["state"]) == [1]
    optimizer.load_state_dict(rowstep.SparseAdam(nn.Linear(2, 2).parameters()).state_dict())
    assert set(optimizer.state_dict()["state"][1]) == {"step", "exp_avg", "exp_avg_sq", ROW_ORDER}

"""Sharded tables as modules: what torch.nn.Embedding and EmbeddingBag read and differentiate, they do too."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import rowstep
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


# Reads and their gradients


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
    for shape in [(), (1,), (7,), (2, 5), (2, 3, 4), (0,), (2, 0, 4)]:
        yield Case(lambda: embedding(ROWS, WIDTH), lambda t, r, s=shape: t(some_ids(r, *s)))  # type: ignore[misc]
    yield Case(lambda: embedding(ROWS, WIDTH), lambda t, r: t(some_ids(r, 6 * (r % 2))))  # some ranks have none
    yield Case(lambda: embedding(ROWS, WIDTH), lambda t, r: t(some_ids(r, 6 if r == 2 else 0)))
    yield Case(lambda: embedding(ROWS, WIDTH), lambda t, r: t(some_ids(r, 6, dtype=torch.int32)))
    yield Case(lambda: embedding(90_001, 1), lambda t, r: t(some_ids(r, 60, rows=90_001, dtype=torch.int32)))
    yield Case(lambda: embedding(ROWS, WIDTH), lambda t, r: t(some_ids(r, 8, 8).t()[::2]))  # not contiguous
    yield Case(lambda: embedding(5, WIDTH), lambda t, r: t(some_ids(r, 9, rows=5)))  # of 4 ranks the last has no row
    yield Case(lambda: embedding(1, WIDTH), lambda t, r: t(some_ids(r, 3, rows=1)))
    yield Case(lambda: embedding(0, WIDTH), lambda t, r: t(torch.empty(0, dtype=torch.int64)))
    for padding in (0, 4, -1, -ROWS):
        yield Case(
            lambda p=padding: embedding(ROWS, WIDTH, padding_idx=p),  # type: ignore[misc]
            lambda t, r, p=padding: t(torch.cat([some_ids(r, 9), torch.tensor([p % ROWS, 7])])),  # type: ignore[misc]
        )
    for norm_type in (1.0, 2.0):
        yield Case(lambda n=norm_type: embedding(ROWS, WIDTH, 2, 0.7, n), lambda t, r: t(some_ids(r, 9)))  # type: ignore[misc]
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
        yield Case(make, lambda t, r: t(some_ids(r, 8 + r), ends(r)[:-1]))
        yield Case(make, lambda t, r: t(some_ids(r, 8 + r), ends(r)))  # the last bag is empty
        yield Case(partial(make, include_last_offset=True), lambda t, r: t(some_ids(r, 8 + r), ends(r)))
        yield Case(make, lambda t, r: t(some_ids(r, 4, 3, dtype=torch.int32)))
        yield Case(make, lambda t, r: t(some_ids(r, 0), torch.tensor([0, 0, 0])))  # three bags, and none has ids
        yield Case(make, lambda t, r: t(some_ids(r, 0), torch.empty(0, dtype=torch.int64)))  # nor is there a bag
        yield Case(make, lambda t, r: t(some_ids(r, 4 * (r % 2), 3)))
        yield Case(partial(make, 5), lambda t, r: t(some_ids(r, 4, 3, rows=5)))
        for padding in (1, -ROWS):
            yield Case(partial(make, padding_idx=padding), lambda t, r: t(torch.arange(12).view(4, 3) // 2))
            yield Case(partial(make, padding_idx=padding), lambda t, r: t(torch.full((2, 3), r % 2)))  # nothing else
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


def read_all_cases(rank: int, ranks: int) -> int:
    count = 0
    for count, case in enumerate(cases(), 1):
        try:
            assert_reads_as_torch(rank, ranks, case, gradient="sum" if count % 2 else "mean")
            if count % 5 == 0:
                assert_reads_as_torch(rank, ranks, case, gradient="mean" if count % 2 else "sum")
        except Exception as error:
            raise AssertionError(f"case {count}: {case.make()}") from error
    return count


@pytest.mark.parametrize("ranks_count", [1, 3, 4])
def test_reads_and_gradients_are_torchs(ranks: Ranks, ranks_count: int) -> None:
    assert min(ranks.run(ranks_count, read_all_cases, ranks_count)) > 60


def test_without_process_group_a_sharded_table_is_a_plain_one() -> None:
    assert read_all_cases(0, 1) > 60
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
    with torch.inference_mode():
        torch.testing.assert_close(table(everything[:50]), plain(everything[:50]))
    with torch.no_grad():
        read = table(everything)
    assert not read.requires_grad
    torch.testing.assert_close(read, plain(everything).detach())
    table.eval()
    torch.testing.assert_close(table.full_weight(), plain.weight.detach())
    table(everything[50:]).sum().backward()  # and training goes on
    optimizers[1].step()

    frozen = shard(nn.Embedding(ROWS, WIDTH, sparse=True, _weight=plain.weight.detach(), _freeze=True))
    assert not frozen.weight.requires_grad
    assert not frozen(everything).requires_grad
    assert same_bits(frozen(everything), plain.weight)
    assert not frozen.to_embedding().weight.requires_grad
    bag = nn.EmbeddingBag.from_pretrained(plain.weight.detach(), freeze=True, sparse=True)
    assert not shard(bag).weight.requires_grad
    assert not shard(bag).to_embedding().weight.requires_grad


def groups_of_some_ranks(rank: int) -> None:
    """Two tables, each on half of the ranks, and one on all."""
    halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    torch.manual_seed(2)
    plain = nn.Embedding(ROWS, WIDTH, padding_idx=1, sparse=True, dtype=torch.float64)
    half = shard(plain, group=halves[rank % 2])
    whole = shard(plain)
    assert (half.ranks, half.rank, whole.ranks, whole.rank) == (2, rank // 2, 4, rank)
    ids = some_ids(rank, 9)
    read = whole(ids) + half(ids)
    torch.testing.assert_close(read, 2 * plain(ids))
    read.sin().sum().backward()
    for table, mates in ((half, range(rank % 2, 4, 2)), (whole, range(4))):
        plain.weight.grad = None
        for mate in mates:
            (2 * plain(some_ids(mate, 9))).sin().sum().mul(0.5 / len(mates)).backward()
        assert plain.weight.grad is not None
        torch.testing.assert_close(full_gradient(table), plain.weight.grad.to_dense())
        assert same_bits(table.full_weight(), plain.weight)
        optimizer = rowstep.SparseAdam(table.parameters())
        optimizer.step()
        moment = optimizer.state_dict()["state"][0]["exp_avg"]
        assert moment.shape == (ROWS, WIDTH, 1)
        assert moment.device_mesh.size() == len(mates)
        assert not torch.equal(table.full_weight(), plain.weight)


def test_weighted_bags_and_reads_without_gradients(ranks: Ranks) -> None:
    ranks.run(3, weighted_bags)
    ranks.run(3, lookups_without_gradients)


def test_tables_of_different_groups(ranks: Ranks) -> None:
    ranks.run(4, groups_of_some_ranks)


# Contents


def whole_tables(rank: int) -> list[Tensor]:
    torch.manual_seed(11)
    tables = [
        ShardedEmbedding(20_000, 2, padding_idx=-1),
        ShardedEmbeddingBag(10, 2, padding_idx=3),
        ShardedEmbedding(4097, 3, dtype=torch.bfloat16),
    ]
    after = torch.rand(1)  # the ranks' own generators have moved on alike
    return [*(table.full_weight() for table in tables), after]


def test_a_seed_makes_one_table_for_any_number_of_ranks(ranks: Ranks) -> None:
    alone = whole_tables(0)
    for count in (1, 2, 3):
        for rank in ranks.run(count, whole_tables):
            for table, expected in zip(rank, alone, strict=True):
                assert torch.equal(table, expected)
    large, small, _, _ = alone
    assert not large[-1].any()
    assert not small[3].any()
    # Each chunk of rows is drawn from a seed of its own: none is another's copy, and together they are normal.
    assert len(torch.unique(large[:-1, 0])) > 19_900
    assert abs(float(large.mean())) < 0.02
    assert abs(float(large.std()) - 1) < 0.02
    torch.manual_seed(12)
    assert not torch.equal(ShardedEmbedding(20_000, 2).full_weight(), large)


def there_and_back(rank: int) -> None:
    embeddings: list[Plain] = [
        nn.Embedding(ROWS, WIDTH, 5, 0.9, 1.0, sparse=True),
        nn.Embedding(5, WIDTH, dtype=torch.float64, sparse=True),
        nn.EmbeddingBag(ROWS, WIDTH, 0.9, 1.0, mode="max", include_last_offset=True, padding_idx=4),
        nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=True, dtype=torch.bfloat16),
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


def rows_that_wait(rank: int) -> None:
    """Whole tables are read up to date on both sides."""
    torch.manual_seed(3)
    plain = nn.Embedding(ROWS, WIDTH, sparse=True, dtype=torch.float64)
    table = shard(plain)
    optimizers = [rowstep.DeferredAdamW(module, lr=0.1, weight_decay=0.1) for module in (plain, table)]
    for step in range(8):
        for module, optimizer in zip((plain, table), optimizers, strict=True):
            module(torch.arange(10 * step, 10 * step + 20)).sin().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    again = shard(plain)  # before anything has read all of it
    torch.testing.assert_close(table.to_embedding().weight, again.full_weight(), rtol=0, atol=1e-12)
    for module, optimizer in zip((plain, table), optimizers, strict=True):
        module(torch.arange(4)).sum().backward()
        optimizer.step()
    torch.testing.assert_close(table.full_weight(), shard(plain).full_weight(), rtol=0, atol=1e-12)


def copies(rank: int) -> None:
    for make in (OPTIMIZERS["plain"], OPTIMIZERS["deferred"]):
        torch.manual_seed(4)
        model: Any = nn.Sequential(ShardedEmbedding(ROWS, WIDTH), nn.Linear(WIDTH, 1))
        optimizer = make(model)
        for _ in range(3):
            model(some_ids(rank, 9)).sum().backward()
            optimizer.step()
        twin, its_optimizer = copy.deepcopy((model, optimizer))
        alone = copy.deepcopy(model)
        for module, other in ((twin, its_optimizer), (alone, rowstep.SparseAdam(alone.parameters()))):
            moments = other.state_dict()["state"][0]
            for value in (moments["exp_avg"], moments["exp_avg_sq"], module.state_dict()["0.weight"]):
                assert isinstance(value, DTensor)
                assert value.shape == (ROWS, WIDTH, 1)
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


def test_whole_tables_go_there_and_back(ranks: Ranks) -> None:
    ranks.run(3, there_and_back)
    ranks.run(3, rows_that_wait)


def test_copies_are_sharded_tables_of_their_own(ranks: Ranks) -> None:
    ranks.run(2, copies)


# Training


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "plain": lambda model: rowstep.SparseAdam(model.parameters(), lr=0.05),
    "counts per row": lambda model: rowstep.SparseAdam(model.parameters(), lr=0.05, bias_correction="row"),
    "amsgrad": lambda model: rowstep.SparseAdam(model.parameters(), lr=0.05, amsgrad=True),
    "decay": lambda model: rowstep.SparseAdam(model.parameters(), 0.05, weight_decay=0.1, decoupled_weight_decay=True),
    "L2": lambda model: rowstep.SparseAdam(model.parameters(), 0.05, weight_decay=0.1, nonfinite="raise"),
    "torch's own": lambda model: torch.optim.SparseAdam([model[0].weight, model[1].weight], lr=0.05),  # type: ignore[index]
    "deferred": lambda model: rowstep.DeferredAdam(model, lr=0.05),
    "deferred amsgrad": lambda model: rowstep.DeferredAdam(model, lr=0.05, amsgrad=True, betas=(0.8, 0.99)),
    "deferred maximize": lambda model: rowstep.DeferredAdam(model, lr=torch.tensor(0.05), maximize=True, eps=1e-6),
    "deferred decay": lambda model: rowstep.DeferredAdamW(model, lr=0.05, weight_decay=0.3),
}


class TwoTables(nn.Module):
    """Two tables and a dense layer, in one optimizer."""

    def __init__(self, sharded: bool) -> None:
        super().__init__()
        torch.manual_seed(6)
        tables: list[Plain] = [
            nn.Embedding(ROWS, WIDTH, padding_idx=2, sparse=True, dtype=torch.float64),
            nn.EmbeddingBag(50, WIDTH, mode="sum", sparse=True, dtype=torch.float64),
        ]
        self.tables = nn.ModuleList([shard(table) if sharded else table for table in tables])
        self.dense = nn.Linear(WIDTH, 1, dtype=torch.float64)

    def __getitem__(self, number: int) -> nn.Module:
        return self.tables[number]

    def forward(self, ids: Tensor) -> Tensor:
        read = self.tables[0](ids).sum(1) + self.tables[1](ids % 50) * self.tables[0](ids[:, 0])
        loss: Tensor = self.dense(read).sin().sum()
        return loss


def part(rank: int, step: int) -> Tensor:
    return some_ids(100 * step + rank, 4 if (step + rank) % 4 else 0, 3)


def train_with_all_optimizers(rank: int, ranks: int) -> dict[str, list[Tensor]]:
    ends = {}
    for name, make in OPTIMIZERS.items():
        model: Any = TwoTables(sharded=True)
        optimizer = make(model)
        for step in range(8):
            optimizer.zero_grad()
            model(part(rank, step)).backward()
            for param in model.dense.parameters():
                dist.all_reduce(param.grad)
                param.grad /= ranks
            optimizer.param_groups[0]["lr"] *= 0.9
            optimizer.step()
        ends[name] = [*(table.full_weight() for table in model.tables), model.dense.weight.detach()]
    return ends


def train_alone(make: Callable[[nn.Module], torch.optim.Optimizer], ranks: int) -> list[Tensor]:
    model: Any = TwoTables(sharded=False)
    optimizer = make(model)
    for step in range(8):
        optimizer.zero_grad()
        for rank in range(ranks):
            (model(part(rank, step)) / ranks).backward()
        optimizer.param_groups[0]["lr"] *= 0.9
        optimizer.step()
    model.eval()
    return [*(table.weight.detach() for table in model.tables), model.dense.weight.detach()]


def test_every_option_of_the_optimizers_works_on_shards(ranks: Ranks) -> None:
    """Tables and a dense layer in one optimizer, also a deferred one: StaleRowsError never comes up."""
    ends = ranks.run(3, train_with_all_optimizers, 3)
    for name, make in OPTIMIZERS.items():
        expected = train_alone(make, 3)
        for rank in ends:
            for weight, alone in zip(rank[name], expected, strict=True):
                torch.testing.assert_close(weight, alone, rtol=0, atol=1e-12)

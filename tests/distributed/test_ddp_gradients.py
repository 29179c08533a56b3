"""Tables that a rank does not use, in programs that handle gradients in any order: as in one process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rowstep
from rowstep.distributed import ShardedEmbedding, ddp
from tests.helpers.ranks import Ranks

WIDTH, DTYPE = 3, torch.float64
Weights = dict[str, Tensor]


class Model(nn.Module):
    """Two whole tables, of which the caller says which are used, a sharded table and a dense layer."""

    def __init__(self, sharded: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        large = nn.Embedding(19, WIDTH, sparse=True, dtype=DTYPE)
        self.first = nn.Embedding(11, WIDTH, sparse=True, dtype=DTYPE)
        self.second = nn.EmbeddingBag(11, WIDTH, mode="sum", sparse=True, dtype=DTYPE)
        self.large: nn.Module = ShardedEmbedding.from_embedding(large) if sharded else large
        self.dense = nn.Linear(WIDTH, 1, dtype=DTYPE)

    def forward(self, ids: Tensor, used: tuple[bool, bool]) -> Tensor:
        read = self.large(ids).sum(1)
        read = read + self.first(ids % 11).sum(1) if used[0] else read
        read = read + self.second(ids % 11) if used[1] else read
        loss: Tensor = self.dense(read).sin().sum()
        return loss


class Run:
    """A model as a program sees it: on one of the ranks, or alone with the batches of all of them."""

    def __init__(self, ranks: int, rank: int | None, deferred: bool, options: dict[str, Any] | None = None) -> None:
        self.ranks, self.alone = ranks, rank is None
        self.batches = range(ranks) if rank is None else [rank]
        self.module = Model(sharded=not self.alone)
        self.model: Any = self.module if self.alone else ddp(self.module, **(options or {}))
        make: Any = rowstep.DeferredAdamW if deferred else rowstep.SparseAdam
        self.optimizer = make(self.module if deferred else self.module.parameters(), lr=0.05)

    def loss(self, step: int) -> Tensor:
        """At each step some rank does not use a table, and at some of them none does."""
        losses = []
        for rank in self.batches:
            ids = torch.randint(19, (2 + rank, 2), generator=torch.Generator().manual_seed(10 * step + rank))
            losses.append(self.model(ids, ((step + rank) % 2 == 0, step % 3 == 1 and rank == 1)))
        return torch.stack(losses).sum() / len(losses)

    def unsynchronized(self) -> contextlib.AbstractContextManager[None]:
        quiet: contextlib.AbstractContextManager[None] = (
            contextlib.nullcontext() if self.alone else self.model.no_sync()
        )
        return quiet

    def weights(self) -> Weights:
        self.module.eval()
        large: Any = self.module.large
        weights = {name: param.detach() for name, param in self.module.named_parameters() if name != "large.weight"}
        return weights | {"large.weight": large.weight.detach() if self.alone else large.full_weight()}


Programs = list[Callable[[Run], None]]


def zero_in_any_way(run: Run) -> None:
    for step in range(8):
        loss = run.loss(step)
        if step % 4 == 0:
            run.optimizer.zero_grad()
        elif step % 4 == 1:
            run.optimizer.zero_grad(set_to_none=False)
        elif step % 4 == 2:
            run.model.zero_grad(set_to_none=step == 2)
        else:
            for param in run.module.parameters():
                param.grad = None
        torch.autograd.backward(loss)
        run.optimizer.step()


def accumulate(run: Run) -> None:
    """Two batches of which only the second is exchanged, after zero_grad between its own forward and backward pass."""
    for step in range(0, 6, 2):
        with run.unsynchronized():
            first = run.loss(step)
            run.optimizer.zero_grad()
            torch.autograd.backward(first)
        torch.autograd.backward(run.loss(step + 1))
        run.optimizer.step()


def one_backward_for_two_forwards(run: Run) -> None:
    for step in (1, 7):  # the same tables are used in both: anything else torch refuses
        loss = run.loss(step) + run.loss(step + 6)
        run.optimizer.zero_grad()
        torch.autograd.backward(loss)
        run.optimizer.step()


def forward_without_backward(run: Run) -> None:
    for step in range(3):
        run.loss(step + 1).detach()
        with torch.no_grad():
            run.loss(step)
        loss = run.loss(step)
        run.optimizer.zero_grad()
        torch.autograd.backward(loss)
        run.optimizer.step()


def backward_that_raises(run: Run) -> None:
    """Before any gradient has arrived: afterwards torch's DDP cannot go on either."""
    for step in range(3):
        loss = run.loss(step)
        broken = loss * 1
        broken.register_hook(lambda grad: 1 / 0)  # type: ignore[no-untyped-call]
        with pytest.raises(ZeroDivisionError):
            torch.autograd.backward(broken)
        run.optimizer.zero_grad()
        torch.autograd.backward(loss)
        run.optimizer.step()


PROGRAMS: Programs = [
    zero_in_any_way,
    accumulate,
    one_backward_for_two_forwards,
    forward_without_backward,
    backward_that_raises,
]


def weights_after(program: Callable[[Run], None], run: Run) -> Weights:
    program(run)
    return run.weights()


def on_a_rank(rank: int, ranks: int, programs: Programs, deferred: bool, options: dict[str, Any]) -> list[Weights]:
    return [weights_after(program, Run(ranks, rank, deferred, options)) for program in programs]


@pytest.mark.parametrize(
    ("count", "programs", "deferred", "options"),
    [
        (2, PROGRAMS, False, {}),
        (3, PROGRAMS[:2], True, {}),
        (3, PROGRAMS[:1], False, {"gradient_as_bucket_view": True, "bucket_cap_mb": 1e-4}),
    ],
)
def test_programs_end_where_one_process_ends(
    ranks: Ranks, count: int, programs: Programs, deferred: bool, options: dict[str, Any]
) -> None:
    expected = [weights_after(program, Run(count, None, deferred)) for program in programs]
    for found in ranks.run(count, on_a_rank, count, programs, deferred, options):
        for weights, alone in zip(found, expected, strict=True):
            for name, weight in alone.items():
                torch.testing.assert_close(weights[name], weight, rtol=0, atol=1e-12)


# Which gradients there are


class Pair(nn.Module):
    """Two tables whose rows come out apart."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first = nn.Embedding(5, WIDTH, sparse=True, dtype=DTYPE)
        self.second = nn.Embedding(5, WIDTH, sparse=True, dtype=DTYPE)
        self.scale = nn.Parameter(torch.ones((), dtype=DTYPE))

    def forward(self, ids: Tensor, use_first: bool = True) -> tuple[Tensor, Tensor]:
        zeros = torch.zeros(len(ids), WIDTH, dtype=DTYPE)
        return self.first(ids) * self.scale if use_first else zeros, self.second(ids) * self.scale


def grads_of(pair: Pair) -> list[list[float] | None]:
    """The sum of each row of each table's gradient."""
    tables = (pair.first.weight, pair.second.weight)
    return [None if table.grad is None else table.grad.to_dense().sum(1).tolist() for table in tables]


def outputs_that_the_loss_leaves_out(rank: int) -> None:
    """The tables behind them are used in the eyes of DDP, but get no gradient."""
    pair = Pair()
    wrapped = ddp(pair)
    for _ in range(2):
        first, _ = wrapped(torch.tensor([rank]))
        wrapped.zero_grad()
        torch.autograd.backward(first.sum())
        assert grads_of(pair) == [[1.5, 1.5, 0, 0, 0], None]


def passes_that_are_not_exchanged(rank: int) -> None:
    pair = Pair()
    wrapped, ids = ddp(pair), torch.tensor([rank])
    with wrapped.no_sync():
        torch.autograd.backward(wrapped(ids, False)[1].sum())
    assert pair.first.weight.grad is None  # as in any process that has not used the table
    wrapped.zero_grad()

    # Of two passes over one graph, DDP exchanges the first.
    loss = torch.cat(wrapped(ids, rank == 0)).sum()
    torch.autograd.backward(loss, retain_graph=True)
    assert grads_of(pair) == [[1.5, 0, 0, 0, 0], [1.5, 1.5, 0, 0, 0]]
    torch.autograd.backward(loss)
    assert grads_of(pair)[0] == [4.5 if rank == 0 else 1.5, 0, 0, 0, 0]
    wrapped.zero_grad()
    loss = wrapped(ids)[1].sum()
    torch.autograd.backward(loss, retain_graph=True)
    wrapped.zero_grad()
    torch.autograd.backward(loss)
    assert grads_of(pair) == [None, [3.0 * (row == rank) for row in range(5)]]


def tables_that_change_sides(rank: int) -> None:
    """Frozen after DDP has counted it, and wrapped again."""
    pair = Pair()
    pair.first.weight.requires_grad_(False)
    wrapped = ddp(pair)
    pair.second.weight.requires_grad_(False)
    ids = torch.tensor([rank])
    torch.autograd.backward(wrapped(ids)[1].sum())
    assert grads_of(pair) == [None, None]
    pair.first.weight.requires_grad_(True)
    pair.second.weight.requires_grad_(True)
    for _ in range(3):
        wrapped = ddp(pair)
    wrapped.zero_grad()
    torch.autograd.backward(torch.cat(wrapped(ids, rank == 0)).sum())
    assert grads_of(pair) == [[1.5, 0, 0, 0, 0], [1.5, 1.5, 0, 0, 0]]

    # One weight in two modules is one table.
    pair = Pair()
    pair.second.weight = pair.first.weight
    wrapped = ddp(pair)
    torch.autograd.backward(wrapped(ids)[1].sum())
    assert grads_of(pair)[0] == [1.5, 1.5, 0, 0, 0]


def all_of_them(rank: int) -> None:
    outputs_that_the_loss_leaves_out(rank)
    passes_that_are_not_exchanged(rank)
    tables_that_change_sides(rank)


def test_only_tables_that_some_rank_used_have_a_gradient(ranks: Ranks) -> None:
    ranks.run(2, all_of_them)

"""Prefetching while other things change: the optimizer, the kind of gradient, the gradient's memory."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from rowstep import DeferredAdamW, HostEmbedding, SparseAdam, _ahead
from rowstep._backends import numba as kernels
from tests.helpers.gradients import rows_of

ROWS = 40
NAMED, OTHERS = torch.arange(5), torch.arange(10, 15)


@pytest.fixture(autouse=True)
def kernels_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROWSTEP_BACKEND", "numba")


class Loop:
    """A table whose rows are read early under SparseAdam, if they are announced."""

    def __init__(self, *, prefetches: bool) -> None:
        torch.manual_seed(0)
        self.prefetches, self.table = prefetches, HostEmbedding(ROWS, 3, device="cpu")
        self.optimizer: Any = SparseAdam(self.table.parameters(), lr=0.1)
        self.announce(NAMED, NAMED)
        for _ in range(2):  # each takes one of these, and nothing is announced any more
            self.train(NAMED)

    def announce(self, *batches: Tensor) -> None:
        for ids in batches if self.prefetches else ():
            self.table.prefetch(ids)
        _ahead.finish_all()

    def train(self, ids: Tensor) -> None:
        self.optimizer.zero_grad()
        self.table(ids).square().sum().backward()
        self.optimizer.step()

    def defer(self) -> None:
        state, self.optimizer = self.optimizer.state_dict(), DeferredAdamW(self.table.parameters(), lr=0.1)
        self.optimizer.load_state_dict(state)


def announced_while_rows_wait(loop: Loop) -> None:
    loop.defer()
    for _ in range(4):
        loop.train(OTHERS)
    loop.announce(NAMED)


def announced_before_rows_wait(loop: Loop) -> None:
    loop.announce(NAMED)
    loop.defer()
    loop.train(NAMED[:0])


def announced_before_a_flush(loop: Loop) -> None:
    announced_before_rows_wait(loop)
    loop.optimizer.flush()


def announced_between_sparse_optimizers(loop: Loop) -> None:
    loop.announce(NAMED, NAMED)
    loop.optimizer = SparseAdam(loop.table.parameters(), lr=0.1)
    loop.train(NAMED)
    loop.announce(NAMED)


@pytest.mark.parametrize(
    "change",
    [
        announced_while_rows_wait,
        announced_before_rows_wait,
        announced_before_a_flush,
        announced_between_sparse_optimizers,
    ],
)
def test_rows_are_as_another_optimizer_has_them(change: Any) -> None:
    plain, ahead = (Loop(prefetches=prefetches) for prefetches in (False, True))
    for loop in (plain, ahead):
        change(loop)
    assert torch.equal(ahead.table(NAMED), plain.table(NAMED))
    for loop in (plain, ahead):
        loop.train(NAMED)
    assert torch.equal(ahead.table.weight, plain.table.weight)


class Slow:
    """The worker makes no step until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_go_on, usual = threading.Event(), kernels._step_part

        def slow(*args: Any) -> int:
            assert self.may_go_on.wait(60)
            return usual(*args)

        monkeypatch.setattr(kernels, "_step_part", slow)


@pytest.mark.parametrize("write", [Tensor.zero_, lambda grad: grad.add_(1)], ids=["zero_grad", "accumulate"])
@pytest.mark.parametrize("make", [SparseAdam, DeferredAdamW])
def test_the_memory_of_a_dense_gradient_may_be_written_to(
    make: Any, write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As zero_grad(set_to_none=False) and autograd do; they give a sparse gradient new memory."""
    results = []
    for prefetches in (False, True):
        torch.manual_seed(0)
        table = HostEmbedding(ROWS, 3, device="cpu")
        optimizer = make(table.parameters(), lr=0.1, second_moment="row")
        table(NAMED).sum().backward()
        optimizer.step()
        torch.autograd.backward(table.weight[3:9].square().sum())
        grad = table.weight.grad
        assert grad is not None and not grad.is_sparse  # noqa: PT018
        if prefetches:
            table.prefetch(OTHERS)
        with monkeypatch.context() as patched:
            slow = Slow(patched)
            if not prefetches:
                slow.may_go_on.set()
            optimizer.step()
            write(grad)
            slow.may_go_on.set()
            _ahead.finish_all()
        results.append(table.weight.detach().clone())
    assert torch.equal(*results)


def test_a_parameter_over_the_memory_of_a_table_gets_its_first_gradient_while_rows_are_announced() -> None:
    weights = []
    for prefetches in (False, True):
        loop = Loop(prefetches=prefetches)
        other = torch.nn.Parameter(loop.table.weight.detach())
        loop.optimizer.add_param_group({"params": [other]})
        loop.announce(OTHERS)
        loop.optimizer.zero_grad()
        loop.table(NAMED).square().sum().backward()
        other.grad = rows_of(other, [1, 20])
        loop.optimizer.step()
        loop.train(OTHERS)
        weights.append(loop.table.weight.detach().clone())
    assert torch.equal(*weights)

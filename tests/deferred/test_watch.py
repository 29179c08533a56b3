"""A table that waits is seen and given back: copies, several optimizers, aliases, threads, memory."""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from rowstep import DeferredAdam, DeferredAdamW, clip_grad_norm_
from tests.helpers.deferred_cases import distance
from tests.helpers.program_runs import ROWS, WIDTH, Run, optimizers

pytestmark = pytest.mark.usefixtures("backend")


def test_a_copy_is_a_plain_parameter() -> None:
    run = Run(*optimizers()[1])
    optimizer = run.make(run.table.parameters())
    run.train(run.table, optimizer, 5)
    copied = copy.deepcopy(run.table.weight)
    assert type(copied) is nn.Parameter
    assert not vars(copied)
    assert isinstance(run.table.weight, nn.Parameter)
    run.train(run.table, optimizer)
    del optimizer
    assert type(run.table.weight) is nn.Parameter
    assert not vars(run.table.weight)


def test_an_optimizer_that_has_lost_its_table_leaves_the_next_ones_alone() -> None:
    """Whatever is done to the old one, the table goes on waiting under the new one."""
    ends: list[Callable[[Any], object]] = [
        lambda old: old.flush(),
        lambda old: old.state_dict(),
        lambda old: copy.deepcopy(old),
        lambda old: old.load_state_dict(old.state_dict()),
        lambda old: old.__del__(),
    ]
    for end in ends:
        runs = [Run(*which) for which in optimizers()]
        for run in runs:
            old = run.make(run.table.parameters())
            run.train(run.table, old, 10)
            new = run.make(run.table.parameters())
            run.train(run.table, new, 10)
            if isinstance(old, DeferredAdam):
                end(old)
            run.train(run.table, new, 5)
        assert distance(runs[1].table.weight, runs[0].table.weight) <= 1e-12


def test_two_optimizers_in_two_threads_take_over_from_each_other() -> None:
    """Neither waits for the other for ever. Which steps of one table in two threads are refused is a matter of luck."""

    def step(optimizer: Any) -> None:
        with contextlib.suppress(RuntimeError):
            optimizer.step()

    ids = torch.arange(5)
    for _ in range(10):
        tables = [nn.Embedding(ROWS, WIDTH, sparse=True) for _ in range(2)]
        both: list[Any] = [DeferredAdamW([table.weight for table in tables]) for _ in range(2)]
        for table, optimizer in zip(tables, both, strict=True):
            torch.autograd.backward(table(ids).sum())
            optimizer.step()
            table.weight.grad = None
        torch.autograd.backward((tables[0](ids) + tables[1](ids)).sum())
        threads = [threading.Thread(target=step, args=(optimizer,), daemon=True) for optimizer in both]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()


def test_a_table_that_knows_its_optimizer_is_freed() -> None:
    run = Run(*optimizers()[1])
    optimizer = run.make(run.table.parameters())
    run.table.weight.register_hook(lambda grad, optimizer=optimizer: None)  # type: ignore[no-untyped-call]
    run.train(run.table, optimizer, 5)
    gone = weakref.ref(run.table)
    del run, optimizer
    gc.collect()
    assert gone() is None


def test_a_table_that_was_replaced_is_freed() -> None:
    run = Run(*optimizers()[1])
    optimizer = run.make(run.table.parameters())
    for _ in range(3):
        run.train(run.table, optimizer, 5)
        old, new = run.table.weight, nn.Parameter(run.table.weight.detach().clone())
        optimizer.state[new] = optimizer.state.pop(old)
        run.table.weight, optimizer.param_groups[0]["params"] = new, [new]
        gone = weakref.ref(old)
        del old
        run.train(run.table, optimizer)
        gc.collect()
        assert gone() is None


def test_a_parameter_made_of_a_table_that_waits() -> None:
    run = Run(*optimizers()[1])
    optimizer = run.make(run.table.parameters())
    for make in (nn.Parameter, nn.Embedding.from_pretrained, lambda data: nn.Embedding(ROWS, WIDTH, _weight=data)):
        run.train(run.table, optimizer, 5)
        made: Any = make(run.table.weight)
        made = made if isinstance(made, nn.Parameter) else made.weight
        assert type(made) is nn.Parameter
        assert made.requires_grad == (make != nn.Embedding.from_pretrained)
        assert torch.equal(made, run.table.weight)
        assert made.data_ptr() == run.table.weight.data_ptr()


def test_tables_that_are_cut_from_one_buffer() -> None:
    results = []
    for make, sparse in optimizers():
        run = Run(make, sparse)
        buffer = torch.randn(2 * ROWS, WIDTH, dtype=torch.float64)
        tables = [nn.Parameter(buffer[:ROWS]), nn.Parameter(buffer[ROWS:])]
        both = [make([table]) for table in tables]
        for step in range(30):
            number = step % 3 == 0

            def look_up(ids: Tensor, table: Tensor = tables[number], sparse: bool = sparse) -> Tensor:
                return functional.embedding(ids, table, sparse=sparse)

            run.train(look_up, both[number])
        results.append([table.detach().clone() for table in tables])
    for one, other in zip(*results, strict=True):
        assert distance(one, other) <= 1e-12


def test_a_table_that_is_swapped_while_rows_wait_is_an_error() -> None:
    run = Run(*optimizers()[1])
    optimizer = run.make(run.table.parameters())
    run.train(run.table, optimizer, 5)
    other = nn.Parameter(torch.ones(ROWS, WIDTH, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="Cannot swap"):
        torch.utils.swap_tensors(run.table.weight, other)  # type: ignore[no-untyped-call]
    optimizer.flush()  # type: ignore[attr-defined]
    optimizer.zero_grad()
    torch.utils.swap_tensors(run.table.weight, other)  # type: ignore[no-untyped-call]
    run.train(run.table, optimizer, 5)


def test_a_write_through_an_alias_is_an_error() -> None:
    """It was made while nothing waited, so nobody sees what is done to it; but autograd counts the writes."""
    run = Run(*optimizers()[1])
    optimizer = run.make(run.table.parameters())
    alias = run.table.weight.detach()
    run.train(run.table, optimizer, 5)
    alias[3] = 0
    with pytest.raises(RuntimeError, match="written to through another tensor"):
        run.train(run.table, optimizer)
    optimizer.flush()  # type: ignore[attr-defined]  # the weights are meant as they are
    run.train(run.table, optimizer, 5)


def test_a_step_is_no_slower_for_what_is_not_read() -> None:
    """Only the rows looked up catch up; nothing in an ordinary loop reads the whole table."""
    run = Run(*optimizers()[1])
    optimizer: Any = run.make(run.table.parameters())
    run.table(torch.arange(ROWS)).sum().backward()
    optimizer.step()
    for _ in range(20):
        run.train(run.table, optimizer)
        assert clip_grad_norm_(run.table.parameters(), 1e9) >= 0
        assert len(run.table.weight) == ROWS
        assert [*run.table.named_parameters()]
        assert torch.ones(2).to(run.table.weight).type_as(run.table.weight).dtype == torch.float64
    assert (optimizer._deferrals[run.table.weight].notes < 10).any()
    assert isinstance(optimizer, DeferredAdam)

"""Programs that act around a table that waits: state dicts shared, aliases written to, failing lookups, tied memory."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import Optimizer

from rowstep import DeferredAdam, DeferredAdamW
from tests.helpers.deferred_cases import distance
from tests.helpers.program_runs import ROWS, WIDTH, Run, optimizers

pytestmark = pytest.mark.usefixtures("backend")


def both(program: Callable[[Run, Optimizer], Any]) -> None:
    """Run a program under dense AdamW and under DeferredAdamW, and hold the tables against each other."""
    tables = []
    for which in optimizers():
        run = Run(*which)
        optimizer = run.make(run.table.parameters())
        run.train(run.table, optimizer, 10)
        program(run, optimizer)
        run.train(run.table, optimizer, 5)
        tables.append(run.table.weight.detach().clone())
    assert distance(*tables) <= 1e-12


def test_a_state_dict_that_is_loaded_twice() -> None:
    """torch's classes go on with the tensors that they were given, the count among them."""

    def program(run: Run, optimizer: Optimizer) -> None:
        saved = copy.deepcopy(optimizer.state_dict())
        for _ in range(2):
            optimizer.load_state_dict(saved)
            run.train(run.table, optimizer, 10)

    both(program)


def test_two_optimizers_that_share_a_state() -> None:
    def program(run: Run, optimizer: Optimizer) -> None:
        other = run.make(run.table.parameters(), lr=0.02)
        other.load_state_dict(optimizer.state_dict())
        for _ in range(5):
            run.train(run.table, other)
            run.train(run.table, optimizer)

    both(program)


def test_parameters_that_share_a_count_count_for_themselves() -> None:
    """Saved tensors may be one and the same, and a count is written in place."""
    tables = [nn.Embedding(4, 2, sparse=True) for _ in range(2)]
    optimizer = DeferredAdam([table.weight for table in tables])
    for table in tables:
        torch.autograd.backward(table(torch.tensor([1])).sum())
    optimizer.step()
    saved = optimizer.state_dict()
    saved["state"][1]["step"] = saved["state"][0]["step"]
    optimizer.load_state_dict(saved)
    optimizer.zero_grad()
    torch.autograd.backward(tables[0](torch.tensor([1])).sum())
    optimizer.step()
    assert [int(optimizer.state[table.weight]["step"]) for table in tables] == [2, 1]


def test_a_state_dict_is_live() -> None:
    """What is put into the dicts of ``state_dict()`` is the optimizer's, as in torch."""

    def program(run: Run, optimizer: Optimizer) -> None:
        state = optimizer.state_dict()["state"][0]
        state["exp_avg"] = torch.zeros_like(state["exp_avg"])

    both(program)


READS: dict[str, Callable[[nn.Embedding, Any], object]] = {
    "a read": lambda table, _: table.weight * 1,
    "a write": lambda table, _: table.weight.detach().mul_(1),
    "state_dict": lambda _, optimizer: optimizer.state_dict(),
    "deepcopy": lambda _, optimizer: copy.deepcopy(optimizer),
    "deepcopy of the table": lambda table, _: copy.deepcopy(table),
    "surgery": lambda table, optimizer: optimizer.reset_rows(table.weight, torch.tensor([1])),
    "up_to_date": lambda table, optimizer: optimizer.up_to_date(table.weight).__enter__(),
    "a lookup": lambda table, _: table(torch.tensor([1])),
}


@pytest.mark.parametrize("name", READS)
def test_a_write_through_an_alias_is_an_error_for_every_read(name: str) -> None:
    run = Run(*optimizers()[1])
    optimizer: Any = run.make(run.table.parameters())
    alias = run.table.weight.detach()
    run.train(run.table, optimizer, 5)
    alias.mul_(0.5)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="written to through another tensor"):
            READS[name](run.table, optimizer)
    optimizer.flush()  # the weights are meant as they are
    READS[name](run.table, optimizer)
    run.train(run.table, optimizer, 5)


def test_a_lookup_that_fails_when_it_has_renormalised_rows() -> None:
    def program(run: Run, optimizer: Optimizer) -> None:
        with contextlib.suppress(IndexError):
            functional.embedding(torch.tensor([4, 5, 999]), run.table.weight, max_norm=0.1)
        with contextlib.suppress(ValueError, RuntimeError):
            functional.embedding_bag(torch.tensor([4, 5, 9]), run.table.weight, torch.tensor([1, 2]), max_norm=0.1)

    both(program)


def test_a_table_that_is_set_to_another() -> None:
    """torch asks nobody before this one."""

    def program(run: Run, optimizer: Optimizer) -> None:
        with torch.no_grad():
            run.table.weight.set_(torch.full((ROWS, WIDTH), 0.3, dtype=torch.float64))  # type: ignore[call-overload]

    both(program)


@pytest.mark.parametrize("together", [True, False])
def test_parameters_over_the_same_memory_are_refused(together: bool) -> None:
    """Rows of one would wait while the other moves them."""
    one, other = nn.Embedding(ROWS, WIDTH, sparse=True), nn.Linear(WIDTH, ROWS, bias=False)
    other.weight.data = one.weight.data[:-1] if together else one.weight.data.clone()
    optimizer = DeferredAdamW([one.weight, other.weight])
    if not together:
        torch.autograd.backward(one(torch.tensor([1])).sum())
        optimizer.step()
        other.weight.data = one.weight.data
    before = one.weight.detach().clone()
    torch.autograd.backward(one(torch.tensor([1])).sum())
    with pytest.raises(ValueError, match="shares memory with another parameter of this optimizer"):
        optimizer.step()
    assert torch.equal(one.weight, before)
    other.weight.data = one.weight.data.clone()
    optimizer.step()


def test_a_program_that_copies_the_attributes_of_a_table() -> None:
    run = Run(*optimizers()[1])
    optimizer = run.make(run.table.parameters())
    run.train(run.table, optimizer, 5)
    new = nn.Parameter(torch.ones(ROWS, WIDTH))
    for name, value in vars(run.table.weight).items():
        setattr(new, name, value)
    assert torch.equal(pickle.loads(pickle.dumps(new)), new)
    assert torch.equal(copy.deepcopy(new), new)
    alike: Any = type(run.table.weight)(torch.ones(ROWS, WIDTH))
    alike.__dict__.update(vars(run.table.weight))
    assert type(alike * 2) is torch.Tensor
    assert type(alike) is nn.Parameter
    run.train(run.table, optimizer, 5)

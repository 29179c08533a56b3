"""Programs that act around a table that waits: aliases, copies, several optimizers, threads, memory."""

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
from torch import nn

from rowstep import DeferredAdam, DeferredAdamW, clip_grad_norm_
from tests.helpers.deferred_cases import distance, in_memory
from tests.helpers.gradients import rows_of
from tests.helpers.program_runs import ROWS, WIDTH, Run, optimizers

pytestmark = pytest.mark.usefixtures("backend")


READS: dict[str, Callable[[nn.Embedding, Any], object]] = {
    "a read": lambda table, _: table.weight * 1,
    "a write": lambda table, _: table.weight.detach().mul_(1),
    "state_dict": lambda _, optimizer: optimizer.state_dict(),
    "deepcopy": lambda _, optimizer: copy.deepcopy(optimizer),
    "deepcopy of the table": lambda table, _: copy.deepcopy(table),
    "surgery": lambda table, optimizer: optimizer.reset_rows(table.weight, torch.tensor([1])),
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


def test_parameters_over_the_same_memory_are_refused() -> None:
    """Rows of one would wait while the other moves them."""
    one, other = nn.Embedding(ROWS, WIDTH, sparse=True), nn.Linear(WIDTH, ROWS, bias=False)
    other.weight.data = one.weight.data[:-1]
    optimizer = DeferredAdamW([one.weight, other.weight])
    before = one.weight.detach().clone()
    torch.autograd.backward(one(torch.tensor([1])).sum())
    with pytest.raises(ValueError, match="shares memory with another parameter of this optimizer"):
        optimizer.step()
    assert torch.equal(one.weight, before)
    other.weight.data = one.weight.data.clone()
    optimizer.step()


PARTS: dict[str, tuple[bool, Callable[[torch.Tensor], tuple[torch.Tensor, ...]]]] = {
    "the end of one is the start of another": (True, lambda buffer: (buffer[:10], buffer[9:15])),
    "one within another": (True, lambda buffer: (buffer, buffer[3:5])),
    "a vector in a table": (True, lambda buffer: (buffer[:10], buffer.view(-1)[7:9])),
    "columns": (True, lambda buffer: (buffer[:, :3], buffer[:, 2:])),
    "every other row": (True, lambda buffer: (buffer[::2], buffer[::3])),
    "not the two beside each other": (True, lambda buffer: (buffer, buffer[1:2], buffer[19:])),
    "rows": (False, lambda buffer: (buffer[:10], buffer[10:])),
    "columns side by side": (False, lambda buffer: (buffer[:, :3], buffer[:, 3:])),
    "odd and even rows": (False, lambda buffer: (buffer[::2], buffer[1::2])),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", PARTS)
def test_parameters_that_overlap_in_part_are_refused(name: str, dtype: torch.dtype) -> None:
    is_refused, cut = PARTS[name]
    buffer = torch.ones(20, 4, dtype=dtype)
    for order in (1, -1):
        params = [nn.Parameter(part) for part in cut(buffer)][::order]
        optimizer = DeferredAdam(params)
        for param in params:
            param.grad = rows_of(param, [1]) if len(param) > 1 else None
        if is_refused:
            with pytest.raises(ValueError, match=r"parameter \d of group 0: it shares memory with another parameter"):
                optimizer.step()
            assert not optimizer.state
            assert (buffer == 1).all()
        else:
            optimizer.step()
            optimizer.flush()


def test_a_layer_that_is_added_over_a_table_that_waits_is_refused() -> None:
    """Its gradient is dense, so it does not wait itself."""
    table, layer = nn.Embedding(ROWS, WIDTH, sparse=True), nn.Linear(WIDTH, 5, bias=False)
    optimizer = DeferredAdam(table.parameters())
    torch.autograd.backward(table(torch.tensor([1])).sum())
    optimizer.step()
    layer.weight.data = table.weight.data[3:8]
    optimizer.add_param_group({"params": layer.parameters()})
    optimizer.zero_grad()
    layer(torch.ones(WIDTH)).sum().backward()
    with pytest.raises(ValueError, match="shares memory with another parameter"):
        optimizer.step()


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


def test_tables_that_were_cut_from_one_buffer_and_converted() -> None:
    """Each has memory of its own then, but torch counts the writes to both together still."""
    buffer = torch.randn(2 * ROWS, WIDTH)
    parts = buffer.chunk(2)
    model: Any = nn.ModuleList(nn.Embedding(ROWS, WIDTH, sparse=True, _weight=part) for part in parts)
    optimizer = DeferredAdam(model.double().parameters())
    twin: Any = nn.ModuleList(nn.Embedding(ROWS, WIDTH, _weight=part.clone()) for part in parts)
    dense = torch.optim.Adam(twin.double().parameters())
    for step in range(6):
        for tables, each in ((model, optimizer), (twin, dense)):
            each.zero_grad()
            for table in tables[: 1 + step % 2]:
                table(torch.tensor([step, step + 1])).square().sum().backward()
            each.step()
    optimizer.flush()
    for one, other in zip(model, twin, strict=True):
        assert distance(one.weight.detach(), other.weight.detach()) <= 1e-12


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
    before = in_memory(run.table.weight)
    optimizer.flush()
    assert distance(before, run.table.weight) > 1e-3  # rows have waited all along


def test_steps_in_inference_mode(backend: str) -> None:
    """The tensor that counts them does not tell who has written to it."""
    if backend == "reference":
        pytest.skip("torch's own operations cannot write a state that was made in this mode outside of it")
    tables = []
    for which in optimizers():
        run = Run(*which)
        optimizer = run.make(run.table.parameters())
        for rows in ([0, 3], [3], [1, 3]):
            optimizer.zero_grad()
            run.table(torch.tensor(rows)).square().sum().backward()
            with torch.inference_mode():
                optimizer.step()
        tables.append(run.table.weight.detach().clone())
    assert distance(*tables) <= 1e-12


def test_a_table_made_in_inference_mode() -> None:
    """It does not tell who has written to it either."""
    with torch.inference_mode():
        ours, theirs = (nn.Parameter(torch.ones(5, 2, dtype=torch.float64)) for _ in range(2))
        optimizer, dense = DeferredAdam([ours]), torch.optim.Adam([theirs])
        for row in (0, 1, 0):
            optimizer.catch_up(ours, torch.tensor([row]))
            ours.grad = rows_of(ours, [row], 1.0)
            theirs.grad = ours.grad.to_dense()
            optimizer.step(), dense.step()
        optimizer.flush()
        assert distance(ours, theirs) <= 1e-12

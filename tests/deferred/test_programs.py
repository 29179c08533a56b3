"""What programs do around an optimizer, done to DeferredAdamW without a word to it: dense AdamW's numbers come out.

Each program is written once and run twice, with torch's dense AdamW and with ours.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.checkpoint import checkpoint

from tests.helpers.deferred_cases import LONG, distance
from tests.helpers.program_runs import ROWS, WIDTH, Run, optimizers

pytestmark = pytest.mark.usefixtures("backend")

STEPS = 200 if LONG else 80

Program = Callable[[Run], Iterator[Tensor]]

PROGRAMS: list[Program] = []


def program(function: Program) -> Program:
    PROGRAMS.append(function)
    return function


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda each: each.__name__)
def test_a_program_gets_dense_adams_numbers(program: Program) -> None:
    """Whatever a program yields on its way is compared, and so are the weights it ends with."""
    theirs, ours = ([each.detach().clone() for each in program(Run(*which))] for which in optimizers())
    assert theirs
    for expected, found in zip(theirs, ours, strict=True):
        assert distance(found, expected) <= 1e-12


@program
def lookups_in_every_way(run: Run) -> Iterator[Tensor]:
    """By functions, by a functional call, and where activations are computed again."""
    table = run.table
    optimizer = run.make(table.parameters())
    ways: list[Callable[[Tensor], Any]] = [
        lambda ids: functional.embedding(ids, table.weight, sparse=run.sparse),
        lambda ids: functional.embedding_bag(ids[:, None], table.weight, mode="sum", sparse=run.sparse),
        lambda ids: torch.func.functional_call(table, dict(table.named_parameters()), (ids,)),
        lambda ids: checkpoint(lambda ids: table(ids).sin(), ids, use_reentrant=False),
    ]
    for step in range(STEPS):
        yield run.train(ways[step % 4], optimizer)
    yield table.weight


@program
def named_parameters_in_groups(run: Run) -> Iterator[Tensor]:
    out = nn.Linear(WIDTH, 2, dtype=torch.float64)
    groups = [
        {"params": list(run.table.named_parameters(prefix="table")), "lr": 0.02},
        {"params": list(out.named_parameters(prefix="out"))},
    ]
    optimizer = run.make(groups)
    for _ in range(STEPS):
        yield run.train(lambda ids: out(run.table(ids)), optimizer)
    yield run.table.weight


@program
def rows_written_between_steps(run: Run) -> Iterator[Tensor]:
    """New data in the old parameter, as LibKGE has it, rows set in place, and all of them initialised again."""
    optimizer = run.make(run.table.parameters())
    for step in range(STEPS):
        yield run.train(run.table, optimizer)
        match step % 20:
            case 3 | 4:
                run.table.weight.data = functional.normalize(run.table.weight.data, dim=-1)
            case 7 | 8:
                with torch.no_grad():
                    run.table.weight[step % ROWS] = 0.5
            case 11 | 12:
                run.table.weight.data[(step + 3) % ROWS] *= 2
            case 15:
                nn.init.xavier_uniform_(run.table.weight)
            case 19:
                run.table.reset_parameters()
    yield run.table.weight


@program
def rows_appended_by_hand(run: Run) -> Iterator[Tensor]:
    """As gsplat does: a new Parameter, and the state under its key, extended. Or the state first."""
    optimizer = run.make(run.table.parameters())
    for round_ in range(4):
        yield run.train(run.table, optimizer, STEPS // 4)
        old = run.table.weight
        if round_ % 2:
            state = longer(optimizer.state.pop(old))
            new = nn.Parameter(torch.cat([old.detach(), torch.ones(2, WIDTH, dtype=torch.float64)]))
        else:
            new = nn.Parameter(torch.cat([old.detach(), torch.ones(2, WIDTH, dtype=torch.float64)]))
            state = longer(optimizer.state.pop(old))
        run.table.weight = new
        optimizer.param_groups[0]["params"] = [new]
        optimizer.state[new] = state
    yield run.train(run.table, optimizer, 20)
    yield run.table.weight


def longer(state: dict[str, Any]) -> dict[str, Any]:
    zeros = torch.zeros(2, WIDTH, dtype=torch.float64)
    return {key: torch.cat([slot, zeros]) if key != "step" else slot for key, slot in state.items()}


@program
def moments_scaled_by_hand(run: Run) -> Iterator[Tensor]:
    """As programs do that restart the momentum."""
    optimizer = run.make(run.table.parameters())
    for _ in range(10):
        run.train(run.table, optimizer, STEPS // 10)
        optimizer.state[run.table.weight]["exp_avg"].mul_(0.1)
        yield optimizer.state[run.table.weight]["exp_avg_sq"]
    yield run.table.weight


@program
def tied_to_an_output_layer(run: Run) -> Iterator[Tensor]:
    optimizer = run.make(run.table.parameters())
    for step in range(STEPS):
        if step % 10:
            yield run.train(run.table, optimizer)
        else:
            yield run.train(lambda ids: functional.linear(run.table(ids), run.table.weight), optimizer)
    yield run.table.weight


@program
def averages_of_the_model(run: Run) -> Iterator[Tensor]:
    """SWA, a moving average by lists, and one by hand, in turn: whichever reads the table first flushes it."""
    optimizer = run.make(run.table.parameters())
    mean: Any = AveragedModel(run.table)
    moving: Any = AveragedModel(run.table, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]
    by_hand = copy.deepcopy(run.table)
    for step in range(STEPS):
        run.train(run.table, optimizer)
        if step % 3 < 2:
            (mean, moving)[step % 3].update_parameters(run.table)
        else:
            with torch.no_grad():
                by_hand.weight.lerp_(run.table.weight, 0.1)
        yield torch.stack([mean.module.weight, moving.module.weight, by_hand.weight])
    update_bn([run.batch()], mean)


@program
def a_logger_of_norms(run: Run) -> Iterator[Tensor]:
    optimizer = run.make(run.table.parameters())
    for _ in range(STEPS):
        run.train(run.table, optimizer)
        yield run.table.weight.norm()
        yield nn.utils.parameters_to_vector(run.table.parameters())


@program
def another_dtype_and_back(run: Run) -> Iterator[Tensor]:
    """In float64 again before the next step: how float32 rounds is another matter."""
    optimizer = run.make(run.table.parameters())
    for _ in range(10):
        yield run.train(run.table, optimizer, STEPS // 10)
        run.table.to(torch.float64).cpu()
        yield run.table.weight
    yield copy.deepcopy(run.table).half().weight


@program
def accumulated_gradients(run: Run) -> Iterator[Tensor]:
    optimizer = run.make(run.table.parameters())
    for _ in range(STEPS // 4):
        optimizer.zero_grad()
        for _ in range(4):
            out = run.table(run.batch())
            out.square().sum().backward()
        optimizer.step()
        yield out
    yield run.table.weight


@program
def a_new_optimizer_every_epoch(run: Run) -> Iterator[Tensor]:
    for _ in range(8):
        optimizer = run.make(run.table.parameters())  # the one before is dropped only now
        yield run.train(run.table, optimizer, STEPS // 8)
    yield run.table.weight


@program
def two_optimizers_take_turns(run: Run) -> Iterator[Tensor]:
    both = [run.make(run.table.parameters(), lr=rate) for rate in (0.05, 0.01)]
    for step in range(STEPS):
        yield run.train(run.table, both[step % 3 == 0])
    yield run.table.weight


@program
def a_table_dropped_from_its_group(run: Run) -> Iterator[Tensor]:
    out = nn.Linear(WIDTH, 2, dtype=torch.float64)
    optimizer = run.make([*run.table.parameters(), *out.parameters()])
    yield run.train(lambda ids: out(run.table(ids)), optimizer, STEPS // 2)
    optimizer.param_groups[0]["params"] = list(out.parameters())  # the table is frozen from now on
    yield run.train(lambda ids: out(run.table(ids)), optimizer, STEPS // 2)
    yield run.table.weight


@program
def a_frozen_table(run: Run) -> Iterator[Tensor]:
    """Without gradients dense Adam leaves the table where it is."""
    optimizer = run.make(run.table.parameters())
    yield run.train(run.table, optimizer, STEPS)
    run.table.requires_grad_(False)
    optimizer.zero_grad()
    for _ in range(3):
        optimizer.step()
        yield run.table(run.batch())
    run.table.requires_grad_(True)
    yield run.train(run.table, optimizer, 20)
    yield run.table.weight


@program
def states_loaded_twice_shared_and_edited(run: Run) -> Iterator[Tensor]:
    """torch's classes go on with the tensors that they were given, the count among them."""
    one, other = run.make(run.table.parameters()), run.make(run.table.parameters(), lr=0.02)
    run.train(run.table, one, 10)
    saved = copy.deepcopy(one.state_dict())
    for _ in range(2):
        one.load_state_dict(saved)
        yield run.train(run.table, one, 10)
    other.load_state_dict(one.state_dict())
    for step in range(10):
        yield run.train(run.table, (other, one)[step % 2])
    state = one.state_dict()["state"][0]
    state["exp_avg"] = torch.zeros_like(state["exp_avg"])  # what is put into these dicts is the optimizer's
    yield run.train(run.table, one, 5)
    yield run.table.weight


@program
def a_table_that_is_set_to_another(run: Run) -> Iterator[Tensor]:
    """torch asks nobody before this one."""
    optimizer = run.make(run.table.parameters())
    run.train(run.table, optimizer, 10)
    with torch.no_grad():
        run.table.weight.set_(torch.full((ROWS, WIDTH), 0.3, dtype=torch.float64))  # type: ignore[call-overload]
    yield run.train(run.table, optimizer, 5)
    yield run.table.weight


@program
def tables_that_are_cut_from_one_buffer(run: Run) -> Iterator[Tensor]:
    buffer = torch.randn(2 * ROWS, WIDTH, dtype=torch.float64)
    tables: list[Tensor] = [nn.Parameter(buffer[:ROWS]), nn.Parameter(buffer[ROWS:])]
    both = [run.make([table]) for table in tables]
    for step in range(30):
        look_up = functools.partial(functional.embedding, weight=tables[step % 3 == 0], sparse=run.sparse)
        run.train(look_up, both[step % 3 == 0])
    yield torch.cat(tables)

"""What programs do around an optimizer, done to DeferredAdamW without a word to it: dense AdamW's numbers come out.

Each program is written once and run twice, with torch's dense AdamW and with ours.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.checkpoint import checkpoint

from deferred_cases import distance
from rowstep import DeferredAdam, DeferredAdamW, clip_grad_norm_

pytestmark = pytest.mark.usefixtures("backend")

STEPS = 200
ROWS, WIDTH = 40, 3

Make = Callable[..., Optimizer]
Program = Callable[["Run"], Iterator[Tensor]]


class Run:
    """One of the two runs: a table, whether its gradients are sparse, and what to make an optimizer with."""

    def __init__(self, make: Make, sparse: bool) -> None:
        torch.manual_seed(7)
        self.make, self.sparse = make, sparse
        self.table = nn.Embedding(ROWS, WIDTH, sparse=sparse, dtype=torch.float64)
        self.ids, self.sign = torch.Generator().manual_seed(1), 1

    def batch(self, count: int = 5) -> Tensor:
        """Ids of which few are frequent, the same in both runs."""
        share = 1 / torch.arange(1.0, ROWS + 1) ** 1.1
        return torch.multinomial(share, count, replacement=True, generator=self.ids)

    def train(self, model: Callable[[Tensor], Tensor], optimizer: Optimizer, steps: int = 1) -> Tensor:
        """Some steps of a model towards goals that depend on the ids; the last output."""
        for _ in range(steps):
            ids = self.batch()
            out = model(ids)
            optimizer.zero_grad()
            # To and fro: near a goal, gradients are all but 0, and Adam makes whole steps of how they are rounded.
            self.sign = -self.sign
            goal = (ids % 7 + 5 * self.sign).to(out.dtype).view(-1, *[1] * (out.dim() - 1))
            torch.autograd.backward((out - goal).square().mean())
            optimizer.step()
        return out.detach()


def optimizers() -> list[tuple[Make, bool]]:
    def dense(params: Any, **options: Any) -> Optimizer:
        return torch.optim.AdamW(params, **({"lr": 0.05} | options))

    def deferred(params: Any, **options: Any) -> Optimizer:
        return DeferredAdamW(params, **({"lr": 0.05} | options))

    return [(dense, False), (deferred, True)]


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
def lookups_by_function(run: Run) -> Iterator[Tensor]:
    weight = run.table.weight
    optimizer = run.make([weight])
    for _ in range(STEPS):
        yield run.train(lambda ids: functional.embedding(ids, weight, sparse=run.sparse), optimizer)
    yield weight


@program
def bags_by_function(run: Run) -> Iterator[Tensor]:
    weight = run.table.weight
    optimizer = run.make([weight])
    for _ in range(STEPS):
        yield run.train(
            lambda ids: functional.embedding_bag(ids.view(-1, 1), weight, mode="sum", sparse=run.sparse),
            optimizer,
        )
    yield weight


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
def rows_normalised_after_each_batch(run: Run) -> Iterator[Tensor]:
    """As LibKGE does: new data in the old parameter."""
    optimizer = run.make(run.table.parameters())
    for _ in range(STEPS):
        run.train(run.table, optimizer)
        run.table.weight.data = functional.normalize(run.table.weight.data, dim=-1)
    yield run.table.weight


@program
def rows_set_in_place(run: Run) -> Iterator[Tensor]:
    optimizer = run.make(run.table.parameters())
    for step in range(STEPS):
        run.train(run.table, optimizer)
        with torch.no_grad():
            run.table.weight[step % ROWS] = 0.5
            run.table.weight.data[(step + 3) % ROWS] *= 2
    yield run.table.weight


@program
def rows_initialised_again(run: Run) -> Iterator[Tensor]:
    optimizer = run.make(run.table.parameters())
    for step in range(STEPS):
        yield run.train(run.table, optimizer)
        if step % 20 == 10:
            nn.init.xavier_uniform_(run.table.weight)
        if step % 20 == 15:
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
def tied_but_detached(run: Run) -> Iterator[Tensor]:
    """The whole table is read at every step, and only the rows looked up get a gradient."""
    optimizer = run.make(run.table.parameters())
    for _ in range(STEPS):
        yield run.train(lambda ids: run.table(ids) @ run.table.weight.detach().T, optimizer)
    yield run.table.weight


@program
def rows_with_a_largest_norm(run: Run) -> Iterator[Tensor]:
    run.table.max_norm = 0.7
    optimizer = run.make(run.table.parameters())
    for _ in range(STEPS):
        yield run.train(run.table, optimizer)
    yield run.table.weight


@program
def an_average_of_the_model(run: Run) -> Iterator[Tensor]:
    optimizer = run.make(run.table.parameters())
    average: Any = AveragedModel(run.table)
    for _ in range(STEPS):
        run.train(run.table, optimizer)
        average.update_parameters(run.table)
        yield average.module.weight
    update_bn([run.batch()], average)


@program
def a_moving_average_by_lists(run: Run) -> Iterator[Tensor]:
    optimizer = run.make(run.table.parameters())
    average: Any = AveragedModel(run.table, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]
    for _ in range(STEPS):
        run.train(run.table, optimizer)
        average.update_parameters(run.table)
    yield average.module.weight


@program
def a_moving_average_by_hand(run: Run) -> Iterator[Tensor]:
    optimizer = run.make(run.table.parameters())
    average = copy.deepcopy(run.table)
    for _ in range(STEPS):
        run.train(run.table, optimizer)
        with torch.no_grad():
            for mean, param in zip(average.parameters(), run.table.parameters(), strict=True):
                mean.lerp_(param, 0.1)
    yield average.weight


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
def weight_norm(run: Run) -> Iterator[Tensor]:
    out = nn.Linear(WIDTH, 2, dtype=torch.float64)
    nn.utils.parametrizations.weight_norm(out)
    model = nn.Sequential(run.table, out)
    optimizer = run.make(model.parameters())
    for _ in range(STEPS):
        yield run.train(model, optimizer)


@program
def a_parametrized_table(run: Run) -> Iterator[Tensor]:
    optimizer = run.make(run.table.parameters())
    yield run.train(run.table, optimizer, STEPS)
    nn.utils.parametrizations.weight_norm(run.table)  # splits the table in two: its optimizer has lost it
    yield run.table.weight


@program
def functional_calls(run: Run) -> Iterator[Tensor]:
    optimizer = run.make(run.table.parameters())
    for _ in range(STEPS):
        params: dict[str, Tensor] = dict(run.table.named_parameters())
        yield run.train(lambda ids: torch.func.functional_call(run.table, params, (ids,)), optimizer)  # noqa: B023
    yield run.table.weight


@program
def checkpointed_activations(run: Run) -> Iterator[Tensor]:
    out = nn.Linear(WIDTH, 2, dtype=torch.float64)
    model = nn.Sequential(run.table, out)
    optimizer = run.make(model.parameters())
    for _ in range(STEPS):
        yield run.train(lambda ids: checkpoint(model, ids, use_reentrant=False), optimizer)
    yield run.table.weight


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
def two_optimizers_of_different_tables(run: Run) -> Iterator[Tensor]:
    other = nn.Embedding(ROWS, WIDTH, sparse=run.sparse, dtype=torch.float64)
    optimizer, second = run.make(run.table.parameters()), run.make(other.parameters(), lr=0.01)
    for _ in range(STEPS):
        second.zero_grad()
        yield run.train(lambda ids: run.table(ids) * other(ids.flip(0)), optimizer)
        second.step()
    yield run.table.weight
    yield other.weight


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
def a_state_dict_kept_and_loaded(run: Run) -> Iterator[Tensor]:
    """Early stopping: the best weights so far, and back to them."""
    optimizer = run.make(run.table.parameters())
    run.train(run.table, optimizer, STEPS // 2)
    best = copy.deepcopy(run.table.state_dict())
    state = copy.deepcopy(optimizer.state_dict())
    yield run.train(run.table, optimizer, STEPS // 4)
    run.table.load_state_dict(best)
    optimizer.load_state_dict(state)
    yield run.train(run.table, optimizer, STEPS // 4)
    yield run.table.weight


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
    optimizer.zero_grad()
    torch.utils.swap_tensors(run.table.weight, other)  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match="swapped with a table whose rows wait"):
        other.sum()
    torch.autograd.backward(run.table(torch.tensor([1])).sum())
    with pytest.raises(RuntimeError, match="swapped with another tensor while rows waited"):
        optimizer.step()


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

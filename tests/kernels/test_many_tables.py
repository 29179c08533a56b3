"""All tables of a group step in one launch, and threads share it: the same bits as if each table were alone.

Within a table the ids are grouped: whatever their order, the occurrences of each come together.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter

from rowstep import DeferredAdamW, SparseAdam
from rowstep._backends import numba as compiled
from rowstep._kernels import internals, pool
from tests.helpers.gradients import rows_of, same_bits, step_with

# Rows, columns and ids: of one size and of very different ones; tables with one row, with one id, with one column.
MANY = [(50, 3, 20), (1, 4, 6), (1000, 16, 900), (7, 1, 1), (300, 33, 500), (5, 2, 100), (40_000, 8, 64)]


@pytest.fixture(params=[2, 3, 8])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Kernels with so many threads however little there is to do."""
    count: int = request.param
    monkeypatch.setenv("ROWSTEP_BACKEND", "numba")
    monkeypatch.setattr(pool, "PARALLEL_FROM_BYTES", 0)
    torch.set_num_threads(count)
    return count


def tables(dtypes: tuple[torch.dtype, ...] = (torch.float64,)) -> list[Parameter]:
    torch.manual_seed(0)
    return [
        Parameter(torch.randn(rows, columns).to(dtypes[number % len(dtypes)]))
        for number, (rows, columns, _) in enumerate(MANY)
    ]


def gradients(params: list[Parameter], step: int) -> list[Tensor]:
    torch.manual_seed(step)
    return [
        rows_of(param, torch.randint(len(param), (0 if (step + number) % 5 == 4 else ids,)))
        for number, (param, (_, _, ids)) in enumerate(zip(params, MANY, strict=True))
    ]


def run(optimizers: list[Any], params: list[Parameter], change: Callable[[Tensor], Tensor] = lambda grad: grad) -> None:
    for step in range(4):
        for param, grad in zip(params, gradients(params, step), strict=True):
            param.grad = change(grad)
        for optimizer in optimizers:
            optimizer.step()


OPTIONS: dict[str, tuple[type, dict[str, Any]]] = {
    "sparse": (SparseAdam, {}),
    "all of sparse": (
        SparseAdam,
        {"amsgrad": True, "bias_correction": "row", "nonfinite": "skip", "weight_decay": 0.1, "maximize": True},
    ),
    "deferred": (DeferredAdamW, {"allow_stale": True}),
}


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("name", OPTIONS)
def test_tables_together_are_as_tables_alone(name: str) -> None:
    cls, options = OPTIONS[name]
    dtypes = (torch.float64, torch.bfloat16, torch.float32) if name == "sparse" else (torch.float64,)
    together, alone = tables(dtypes), tables(dtypes)
    optimizers = [cls(together, lr=0.1, **options)], [cls([param], lr=0.1, **options) for param in alone]
    run(optimizers[0], together)
    torch.set_num_threads(1)
    run(optimizers[1], alone)
    for optimizer in (*optimizers[0], *optimizers[1]):
        if isinstance(optimizer, DeferredAdamW):
            optimizer.flush()
    for one, other in zip(together, alone, strict=True):
        assert same_bits(one, other)


@pytest.mark.usefixtures("threads")
def test_rows_that_are_skipped_are_counted_over_tables_and_threads() -> None:
    params = tables()
    optimizer = SparseAdam(params, nonfinite="skip")
    expected = 0

    def spoilt(grad: Tensor) -> Tensor:
        nonlocal expected
        values = grad._values().clone()
        values[::3] = torch.inf
        expected += len(torch.unique(grad._indices()[0, ::3]))
        return torch.sparse_coo_tensor(grad._indices(), values, grad.shape, check_invariants=True)

    run([optimizer], params, spoilt)
    assert optimizer.skipped_rows == expected > 0
    assert all(bool(param.isfinite().all()) for param in params)


def test_tables_over_the_same_memory_step_one_after_the_other(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = torch.ones(700, 8)
    params = [Parameter(memory[:400]), Parameter(memory[200:600]), Parameter(torch.ones(400, 8))]
    launched: list[list[Tensor]] = []

    def step(self: compiled.Launch) -> int:
        launched.append([job.param for job in self.jobs])
        return step_it(self)

    step_it = compiled.Launch.step
    monkeypatch.setattr(compiled.Launch, "step", step)
    for param in params:
        param.grad = rows_of(param, torch.arange(400), 1.0)
    optimizer = SparseAdam(params, lr=0.1)
    for _ in range(2):
        optimizer.step()
        together, alone = launched
        assert [id(param) for param in together] == [id(params[0]), id(params[2])]
        assert [id(param) for param in alone] == [id(params[1])]
        launched.clear()
    torch.testing.assert_close(memory[[0, 300, 500], 0], torch.tensor([0.8, 0.6, 0.8]))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("name", ["sparse", "deferred"])
def test_a_parameter_that_is_listed_twice_takes_two_steps(name: str) -> None:
    cls, options = OPTIONS[name]
    once, twice = (Parameter(torch.ones(600, 2)) for _ in range(2))
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizers = cls([once], **options), cls([twice, twice], **options)
    for _ in range(3):
        for param, optimizer, steps in ((once, optimizers[0], 2), (twice, optimizers[1], 1)):
            param.grad = rows_of(param, [1, 5, 1], 1.0)
            for _ in range(steps):
                optimizer.step()
    for optimizer in optimizers:
        if isinstance(optimizer, DeferredAdamW):
            optimizer.flush()
    assert same_bits(once, twice)
    (one,), (other,) = (optimizer.state.values() for optimizer in optimizers)
    assert int(other["step"]) == 6
    assert all(torch.equal(one[key], other[key]) for key in one if key != "step")


@given(
    jobs=st.lists(st.tuples(st.integers(1, 5000), st.integers(1, 300), st.integers(1, 70)), min_size=1, max_size=12),
    threads=st.integers(2, 9),
    popular=st.booleans(),
    kind=st.sampled_from([(torch.float32, "element"), (torch.bfloat16, "element"), (torch.float32, "row")]),
    seed=st.integers(0, 1000),
)
def test_threads_share_any_tables_and_move_every_row_once(
    jobs: list[tuple[int, int, int]], threads: int, popular: bool, kind: tuple[torch.dtype, Any], seed: int
) -> None:
    """If few rows are popular, a cut between two threads falls inside a row's duplicates."""
    dtype, second_moment = kind
    torch.manual_seed(seed)
    starts = [torch.randn(rows, columns).to(dtype) for rows, _, columns in jobs]
    grads = []
    for start, (rows, count, _) in zip(starts, jobs, strict=True):
        grads.append(rows_of(start, (torch.rand(count) ** (20 if popular else 1) * rows).long()))
    results: list[list[Tensor]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROWSTEP_BACKEND", "numba")
        patch.setattr(pool, "PARALLEL_FROM_BYTES", 0)
        for number in (1, threads):
            torch.set_num_threads(number)
            params = [Parameter(start.clone()) for start in starts]
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad
            optimizer = SparseAdam(params, lr=0.1, second_moment=second_moment)
            for _ in range(2):
                optimizer.step()
            slots = [slot for state in optimizer.state.values() for name, slot in state.items() if name != "step"]
            results.append([*params, *slots])
    assert all(same_bits(one, other) for one, other in zip(*results, strict=True))


def test_the_pool_of_the_installed_numba_is_the_one_that_we_know() -> None:
    assert internals._is_as_declared()
    assert internals.pool_address()


def test_a_pool_that_is_declared_in_another_way_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspect, "getsource", lambda module: "def other(): pass")
    internals.pool_address.cache_clear()
    assert internals.pool_address() == 0
    internals.pool_address.cache_clear()


def test_without_a_pool_that_we_know_one_thread_makes_all_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROWSTEP_BACKEND", "numba")
    monkeypatch.setattr(pool, "PARALLEL_FROM_BYTES", 0)
    torch.set_num_threads(2)
    results: list[list[Parameter]] = []
    for address in (internals.pool_address(), 0):
        monkeypatch.setattr(pool, "_pool", lambda address=address: address)
        params = tables()
        run([SparseAdam(params)], params)
        results.append(params)
    for one, other in zip(*results, strict=True):
        assert same_bits(one, other)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    ("rows", "order"),
    [
        *((rows, "random") for rows in (1, 2, 3, 4095, 4096, 4097, 2**16 + 1, 2**24 + 1)),
        *((4097, order) for order in ("ascending", "descending", "one row", "two rows")),
        (2**24, "two rows"),
    ],
)
def test_occurrences_come_together_in_a_table_of_any_size(rows: int, order: str) -> None:
    ids = torch.randint(rows, (3000,))
    if order in ("ascending", "descending"):
        ids = ids.sort(descending=order == "descending").values
    elif order == "one row":
        ids.fill_(rows - 1)
    elif order == "two rows":
        ids = torch.where(ids % 2 == 0, 0, rows - 1)
    values = torch.randint(-50, 50, (3000,)).float()
    param = Parameter(torch.zeros(rows, 1))
    optimizer = SparseAdam([param], betas=(0.0, 0.0))  # the first moment is then the summed gradient
    step_with(optimizer, param, rows_of(param, ids, values))
    expected: dict[int, float] = {}
    for row, value in zip(ids.tolist(), values.tolist(), strict=True):
        expected[row] = expected.get(row, 0.0) + value
    moment = optimizer.state[param]["exp_avg"].flatten()
    assert moment[list(expected)].tolist() == list(expected.values())
    assert math.isclose(moment.sum(dtype=torch.float64).item(), sum(expected.values()))
    assert (moment != 0).sum().item() == sum(value != 0 for value in expected.values())

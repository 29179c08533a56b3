"""Python threads around one optimizer and around several: readers, writers, checkpoints, backward passes."""

from __future__ import annotations

import copy
import faulthandler
import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rowstep import DeferredAdam, DeferredAdamW, SparseAdam
from rowstep._kernels import pool
from tests.helpers.deferred_cases import BAR, LONG, RATE, Twins, distance, embedding, with_dense_gradients
from tests.helpers.gradients import copy_of, rows_of, same_bits, table

ROUNDS = 20 if LONG else 2


@pytest.fixture(params=["reference", "numba", "numba on two threads"], autouse=True)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each backend, and kernels that have two threads however little there is to do."""
    name, _, threads = request.param.partition(" on ")
    monkeypatch.setenv("ROWSTEP_BACKEND", name)
    if threads:
        torch.set_num_threads(2)
        monkeypatch.setattr(pool, "PARALLEL_FROM_BYTES", 0)


# No test waits this long unless threads wait for each other.
LONGEST_WAIT = 120.0


def together(*actions: Callable[[], object]) -> None:
    """Run each of these in a thread of its own, all from the same moment on, with as many switches as Python can."""
    start = threading.Barrier(len(actions))
    errors: list[BaseException] = []

    def run(action: Callable[[], object]) -> None:
        try:
            start.wait(LONGEST_WAIT)
            action()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(action,), daemon=True) for action in actions]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONGEST_WAIT)
    finally:
        sys.setswitchinterval(interval)
    if any(thread.is_alive() for thread in threads):
        faulthandler.dump_traceback()
        raise TimeoutError("threads wait for each other")
    if errors:
        raise errors[0]


def look_up(module: nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        read: Tensor = module(ids)
        return read


def test_threads_that_only_read() -> None:
    """Each row is brought up to date once, whoever reads it first."""
    rows = 300
    twins = Twins(embedding(rows, 5), lr=0.1)
    twins.look_up(*range(rows))
    for _ in range(ROUNDS):
        for _ in range(3):
            twins.look_up(0)
        expected = twins.twin.weight.detach().clone()

        def read(seed: int) -> None:
            order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
            for ids in torch.split(order, 7):
                assert distance(look_up(twins.model, ids), expected[ids]) <= BAR  # noqa: B023

        together(*(functools.partial(read, seed) for seed in range(4)))
        twins.assert_same()


def test_threads_that_look_up_a_table_with_a_largest_norm() -> None:
    """Each lookup writes to the rows that it reads."""
    table = nn.Embedding(200, 4, max_norm=0.5, sparse=True)
    optimizer = DeferredAdam(table.parameters(), lr=0.01)

    def read(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(30 * ROUNDS):
            look_up(table, torch.randint(200, (5,), generator=generator))

    def train() -> None:
        for _ in range(30 * ROUNDS):
            optimizer.zero_grad()
            table(torch.randint(200, (5,))).sum().backward()
            optimizer.step()

    train()
    together(*(functools.partial(read, seed) for seed in range(3)))


class Trajectory:
    """A table in training, and what dense Adam makes of it at every step."""

    def __init__(self, rows: int, steps: int) -> None:
        self.model = embedding(rows, 3)
        twin = with_dense_gradients(self.model)
        self.optimizer, dense = DeferredAdamW(self.model, lr=RATE), torch.optim.AdamW(twin.parameters(), lr=RATE)
        self.batches = [torch.randint(rows, (4,)) for _ in range(steps)]
        self.tables = [twin.weight.detach().clone()]
        self.moments: list[dict[str, Tensor]] = [{}]
        for batch in self.batches:
            self.train(twin, dense, batch)
            self.tables.append(twin.weight.detach().clone())
            self.moments.append(copy.deepcopy(dense.state[twin.weight]))

    @staticmethod
    def train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
        optimizer.zero_grad()
        torch.autograd.backward(model(batch).square().sum())
        optimizer.step()

    def run(self) -> None:
        for batch in self.batches:
            self.train(self.model, self.optimizer, batch)

    def assert_held(self, ids: Tensor, read: Tensor) -> None:
        """Every number that was read is one that dense Adam had after some step."""
        held = torch.stack([table[ids] for table in self.tables])
        assert ((held - read).abs().amin(dim=0) <= BAR).all()

    def assert_saved(self, saved: dict[str, Any]) -> None:
        """A checkpoint has the moments of the step that it names."""
        for state in saved["state"].values():
            for key, expected in self.moments[int(state["step"])].items():
                assert distance(state[key], expected) <= BAR, key

    def assert_at_its_end(self) -> None:
        saved = self.optimizer.state_dict()
        assert distance(self.model.weight, self.tables[-1]) <= BAR
        assert int(saved["state"][0]["step"]) == len(self.batches)
        self.assert_saved(saved)


def test_readers_and_checkpoints_beside_training() -> None:
    """What they see is from before or after a step, and training does not notice them."""
    rows = 60
    for _ in range(ROUNDS):
        run = Trajectory(rows, 30)
        # A hook sees what is saved before another step may come.
        run.optimizer.register_state_dict_post_hook(lambda self, saved: run.assert_saved(saved))  # noqa: B023
        ended = threading.Event()

        def train() -> None:
            try:
                run.run()  # noqa: B023
            finally:
                ended.set()  # noqa: B023

        def read(seed: int) -> None:
            generator = torch.Generator().manual_seed(seed)
            while not ended.is_set():  # noqa: B023
                ids = torch.randint(rows, (5,), generator=generator)
                run.assert_held(ids, look_up(run.model, ids))  # noqa: B023

        def save() -> None:
            while not ended.is_set():  # noqa: B023
                run.optimizer.state_dict()  # noqa: B023
                run.assert_held(torch.arange(rows), run.model.state_dict()["weight"].clone())  # noqa: B023

        together(train, functools.partial(read, 1), functools.partial(read, 2), save)
        run.assert_at_its_end()


MAKERS: dict[str, Callable[[Any], Any]] = {
    "sparse": lambda params: SparseAdam(params, lr=0.1),
    "row counts": lambda params: SparseAdam(params, lr=0.1, bias_correction="row", nonfinite="skip"),
    "deferred": lambda params: DeferredAdam(params, lr=0.1),
    "decayed": lambda params: DeferredAdamW(params, lr=0.1, amsgrad=True),
}


@pytest.mark.parametrize("name", MAKERS)
def test_every_step_of_two_threads_counts(name: str) -> None:
    calls = 15 * ROUNDS
    alone = [table(20, 3, dtype=torch.float64), table(4, 3, dtype=torch.float64)]
    shared = [copy_of(param) for param in alone]
    grads = [rows_of(alone[0], [3, 1, 3, 19]), torch.randn_like(alone[1])]
    if name == "row counts":
        grads[0]._values()[1] = torch.inf
    optimizers = [MAKERS[name](params) for params in (alone, shared)]
    for params in (alone, shared):
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad

    def step(optimizer: Any, count: int) -> None:
        for _ in range(count):
            optimizer.step()

    step(optimizers[0], 2 * calls)
    together(*[functools.partial(step, optimizers[1], calls)] * 2)
    assert getattr(optimizers[1], "skipped_rows", 0) == (2 * calls if name == "row counts" else 0)
    states = [optimizer.state_dict()["state"] for optimizer in optimizers]
    for index, (one, other) in enumerate(zip(alone, shared, strict=True)):
        assert int(states[1][index]["step"]) == 2 * calls
        assert same_bits(one, other)
        for key in ("exp_avg", "exp_avg_sq"):
            assert same_bits(states[0][index][key], states[1][index][key])

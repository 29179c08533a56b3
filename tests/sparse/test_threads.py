"""Python threads around one optimizer and around several: readers, writers, checkpoints, backward passes."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rowstep import DeferredAdam, DeferredAdamW, SparseAdam
from rowstep._backends import numba as compiled
from tests.helpers.concurrency import together
from tests.helpers.deferred_cases import BAR, LONG, RATE, Twins, distance, embedding, with_dense_gradients
from tests.helpers.gradients import copy_of, rows_of, same_bits, step_with, table

ROUNDS = 20 if LONG else 2


@pytest.fixture(params=["reference", "numba", "numba on two threads"], autouse=True)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each backend, and kernels that have two threads however little there is to do."""
    name, _, threads = request.param.partition(" on ")
    monkeypatch.setenv("ROWSTEP_BACKEND", name)
    if threads:
        torch.set_num_threads(2)
        monkeypatch.setattr(compiled, "PARALLEL_FROM_BYTES", 0)


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


class Trajectory:
    """A table in training, and what dense Adam makes of it at every step."""

    def __init__(self, rows: int, steps: int) -> None:
        self.model = embedding(rows, 3)
        twin = with_dense_gradients(self.model)
        self.optimizer, dense = DeferredAdamW(self.model, lr=RATE), torch.optim.AdamW(twin.parameters(), lr=RATE)
        self.batches = [torch.randint(rows, (4,)) for _ in range(steps)]
        self.tables = [twin.weight.detach().clone()]
        for batch in self.batches:
            self.train(twin, dense, batch)
            self.tables.append(twin.weight.detach().clone())
        self.moments = dense.state[twin.weight]

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

    def assert_at_its_end(self) -> None:
        self.optimizer.flush()
        assert distance(self.model.weight, self.tables[-1]) <= BAR
        state = self.optimizer.state[self.model.weight]
        assert int(state["step"]) == len(self.batches)
        for key in ("exp_avg", "exp_avg_sq"):
            assert distance(state[key], self.moments[key]) <= BAR


def test_readers_and_checkpoints_beside_training() -> None:
    """What they see is from before or after a step, and training does not notice them."""
    rows = 60
    for _ in range(ROUNDS):
        run = Trajectory(rows, 30)
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


@pytest.mark.parametrize("name", MAKERS)
def test_optimizers_of_their_own_in_threads_of_their_own(name: str) -> None:
    starts = [table(50, 4, dtype=torch.float64) for _ in range(3)]
    grads = [[rows_of(start, torch.arange(50)) for _ in range(5 * ROUNDS)] for start in starts]

    def run(param: Tensor, steps: list[Tensor]) -> None:
        optimizer = MAKERS[name]([param])
        for grad in steps:
            step_with(optimizer, param, grad)

    alone, at_once = [copy_of(start) for start in starts], [copy_of(start) for start in starts]
    for param, steps in zip(alone, grads, strict=True):
        run(param, steps)
    together(*(functools.partial(run, *pair) for pair in zip(at_once, grads, strict=True)))
    assert all(same_bits(one, other) for one, other in zip(alone, at_once, strict=True))


def test_backward_passes_in_threads_of_their_own() -> None:
    """Several forward and backward passes at once, then one step, as programs do that have several trainers."""
    twins = Twins(embedding(40), lr=RATE)
    for _ in range(5 * ROUNDS):
        batches = [torch.randint(40, (3,)) for _ in range(3)]
        twins.each(lambda model, optimizer: optimizer.zero_grad())

        def train(batch: Tensor) -> None:
            torch.autograd.backward(twins.model(batch).sum() * 3)

        together(*(functools.partial(train, batch) for batch in batches))
        for batch in batches:
            torch.autograd.backward(twins.twin(batch).sum() * 3)
        twins.each(lambda model, optimizer: optimizer.step())
    twins.assert_same()


def test_a_step_at_the_end_of_each_threads_backward_pass() -> None:
    """As with hooks that step while gradients arrive: gradients of threads may meet in one step, but none is lost.

    torch adds one thread's gradient to another's without a lock. A step that sees indices and values of different sums
    is refused, and the gradient is there for the next.
    """
    module = embedding(6)
    optimizer = SparseAdam(module.parameters(), lr=RATE)
    steps: list[None] = []

    def step(param: Tensor) -> None:
        try:
            optimizer.step()
        except ValueError as torn:
            assert "for row numbers" in str(torn)  # noqa: PT017  any thread's
            return
        steps.append(None)  # not a number to add to: two threads can read the same one

    module.weight.register_post_accumulate_grad_hook(step)  # type: ignore[no-untyped-call]

    def train() -> None:
        for _ in range(5 * ROUNDS):
            torch.autograd.backward(module(torch.tensor([1, 4])).sum())

    together(train, train)
    assert optimizer.state[module.weight]["step"] == len(steps)
    assert module.weight.isfinite().all()


class Meddler:
    """Lets another thread step, if it can, right after an optimizer has brought all rows up to date."""

    def __init__(self, run: Trajectory) -> None:
        self._run, self._flush, self.came_between = run, run.optimizer._flush, False
        self._thread = threading.Thread(target=self._step, daemon=True)
        run.optimizer._flush = self._flush_and_step  # type: ignore[method-assign]

    def _step(self) -> None:
        self._run.optimizer.step()

    def _flush_and_step(self, params: Sequence[Tensor]) -> None:
        self._flush(params)
        if not self._thread.ident:
            self._thread.start()
            self._thread.join(0.2)  # a step takes a thousandth of that, unless it has to wait its turn
            self.came_between = not self._thread.is_alive()

    def leave(self) -> None:
        del self._run.optimizer._flush
        self._thread.join()


@pytest.fixture
def waiting() -> Trajectory:
    """A table with waiting rows, and a gradient for another step."""
    run = Trajectory(20, 10)
    run.batches, last = run.batches[:-1], run.batches[-1]
    run.run()
    run.optimizer.zero_grad()
    torch.autograd.backward(run.model(last).square().sum())
    run.batches.append(last)
    return run


def test_no_step_comes_between_a_flush_and_its_checkpoint(waiting: Trajectory) -> None:
    optimizer, seen = waiting.optimizer, []
    optimizer.register_state_dict_post_hook(lambda self, saved: seen.append(copy.deepcopy(saved)))
    alone = copy.deepcopy(optimizer).state_dict()["state"][0]
    meddler = Meddler(waiting)
    optimizer.state_dict()
    meddler.leave()
    for key in ("step", "exp_avg", "exp_avg_sq"):
        assert torch.equal(seen[-1]["state"][0][key], alone[key]), key
    waiting.assert_at_its_end()


def test_no_step_comes_between_a_flush_and_what_is_pickled(waiting: Trajectory) -> None:
    meddler = Meddler(waiting)
    waiting.optimizer.__getstate__()
    meddler.leave()
    assert not meddler.came_between
    waiting.assert_at_its_end()


def test_no_step_comes_between_a_flush_and_the_block_it_is_for(waiting: Trajectory) -> None:
    meddler = Meddler(waiting)
    with waiting.optimizer.up_to_date(waiting.model.weight) as weight:
        meddler.leave()  # it has stepped by now, and that too is up to date
        assert distance(weight, waiting.tables[-1]) <= BAR
    waiting.assert_at_its_end()


def test_no_step_comes_into_an_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Moments that a step has just made are not replaced by empty ones."""
    param = table(6, 2)
    optimizer = SparseAdam([param])
    param.grad = rows_of(param, [1])
    thread = threading.Thread(target=optimizer.step, daemon=True)
    zeros_like = torch.zeros_like

    def slow(*args: Any, **kwargs: Any) -> Tensor:
        if not thread.ident:
            thread.start()
            thread.join(0.2)
        return zeros_like(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros_like", slow)
        optimizer.allocate_state()
        thread.join()
    assert int(optimizer.state[param]["step"]) == 1
    assert optimizer.state[param]["exp_avg"].any()

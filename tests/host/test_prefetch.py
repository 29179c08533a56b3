"""Rows that are read early and stepped late are the same bits as those of the plain loop."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import multiprocessing
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rowstep import DeferredAdam, DeferredAdamW, HostEmbedding, SparseAdam, _ahead, clip_grad_norm_, prefetched, storage
from rowstep._backends import numba as kernels
from rowstep._waiting import Waiting
from tests.helpers.deferred_cases import LONG

ROWS, DIM = 60, 5
BF16 = torch.bfloat16

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "SparseAdam": lambda p: SparseAdam(p, lr=0.1),
    "amsgrad, decay": lambda p: SparseAdam(p, lr=0.1, amsgrad=True, weight_decay=0.1, decoupled_weight_decay=True),
    "counts by row": lambda p: SparseAdam(p, lr=0.1, bias_correction="row", maximize=True),
    "by row, no momentum": lambda p: SparseAdam(p, lr=0.1, second_moment="row", betas=(0, 0.99)),
    "bfloat16 state": lambda p: SparseAdam(p, lr=0.1, state_dtype=BF16),
    "skips": lambda p: SparseAdam(p, lr=0.1, nonfinite="skip"),
    "DeferredAdam": lambda p: DeferredAdam(p, lr=0.1),
    "DeferredAdamW, amsgrad": lambda p: DeferredAdamW(p, lr=0.1, weight_decay=0.1, amsgrad=True),
    "DeferredAdamW, bfloat16": lambda p: DeferredAdamW(p, lr=0.1, second_moment="row", state_dtype=BF16),
}


@pytest.fixture(autouse=True)
def slow_worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The worker takes its time, so that whoever does not wait for it finds what is not finished."""
    usual, dice = kernels._step_part, random.Random(0)

    def slow(*args: Any) -> int:
        time.sleep(dice.choice([0, 0, 0.001]))
        return usual(*args)

    monkeypatch.setenv("ROWSTEP_BACKEND", "numba")
    monkeypatch.setattr(kernels, "_step_part", slow)
    yield
    _ahead.finish_all()


class Run:
    """A table, an optimizer, and a loop."""

    def __init__(self, make: Callable[..., Any], dtype: torch.dtype = torch.float32, **options: Any) -> None:
        torch.manual_seed(0)
        self.table = HostEmbedding(ROWS, DIM, dtype=dtype, device="cpu", **options)
        self.optimizer = make(self.table.parameters())
        self.optimizer.param_groups[0]["stochastic_rounding"] = dtype == BF16
        self.losses: list[Tensor] = []

    def back(self, ids: Tensor, factor: float = 1.0) -> None:
        loss = (self.table(ids).square().sum() * factor).float()
        self.losses.append(loss.detach())
        loss.backward()

    def step(self, ids: Tensor, optimizer: Any) -> None:
        optimizer.zero_grad()
        self.back(ids)
        optimizer.step()

    def numbers(self) -> list[Any]:
        state = self.optimizer.state_dict()["state"][0]
        return [*self.losses, self.table.weight.detach(), *(state[name] for name in sorted(state))]


def assert_same(one: Run, other: Run) -> None:
    for a, b in zip(one.numbers(), other.numbers(), strict=True):
        torch.testing.assert_close(torch.as_tensor(a), torch.as_tensor(b), rtol=0, atol=0, equal_nan=True)


def batches(count: int, overlap: float, size: int = 12) -> list[Tensor]:
    """Batches that share so many of their ids with the one before, in any order, some of them twice."""
    numbers, found = torch.Generator().manual_seed(1), []
    usual = torch.randint(0, ROWS, (size,), generator=numbers)
    for _ in range(count):
        fresh = torch.randint(0, ROWS, (size,), generator=numbers)
        is_fresh = torch.rand(size, generator=numbers) >= overlap
        found.append(torch.where(is_fresh, fresh, usual)[torch.randperm(size, generator=numbers)].view(3, -1))
    return found


def late_parts(run: Run) -> int:
    """How many rows the worker has still to step, at least."""
    return 0 if _ahead.of_table(run.table.weight).is_idle else 1


@pytest.mark.parametrize("overlap", [0, 0.5, 1])
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("options", OPTIMIZERS)
def test_same_bits(options: str, dtype: torch.dtype, overlap: float) -> None:
    plain, ahead = (Run(OPTIMIZERS[options], dtype) for _ in range(2))
    loader, late = batches(1000 if LONG else 40, overlap), 0
    for run, source in ((plain, loader), (ahead, prefetched(loader, {ahead.table: lambda ids: ids}))):
        for number, ids in enumerate(source):
            run.optimizer.param_groups[0]["lr"] = 0.1 / (1 + number)
            run.optimizer.zero_grad()
            run.back(ids, float("nan") if options == "skips" and number % 7 == 3 else 1.0)
            clip_grad_norm_(run.table.parameters(), 1e9 if options == "skips" else 1.0)
            run.optimizer.step()
            late += late_parts(ahead)
    assert late  # or nothing was tried
    assert_same(plain, ahead)
    if options == "skips":
        assert plain.optimizer.skipped_rows == ahead.optimizer.skipped_rows > 0


DOINGS = ["step", "step", "step", "accumulate", "unannounced", "never used", "twice", "read", "write", "state", "eval"]


@pytest.mark.parametrize("options", OPTIMIZERS)
@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_calls(options: str, seed: int) -> None:
    plain, ahead = (Run(OPTIMIZERS[options]) for _ in range(2))
    for run in (plain, ahead):
        dice, numbers = random.Random(seed), torch.Generator().manual_seed(seed)
        following = torch.randint(0, ROWS, (8,), generator=numbers)
        for _ in range(120):
            doing = dice.choice(DOINGS)
            ids, following = following, torch.randint(0, ROWS, (8,), generator=numbers)
            if run is ahead and doing != "unannounced":
                announced = [following] * (1 + (doing == "twice"))
                announced += [torch.randint(0, ROWS, (8,))] * (doing == "never used")
                for each in sorted(announced, key=lambda _: random.random()):
                    run.table.prefetch(each)
            run.back(ids)
            if doing == "accumulate":
                continue
            run.optimizer.step()
            run.optimizer.zero_grad(set_to_none=bool(dice.getrandbits(1)))
            if doing == "read":
                run.losses.append(run.table.weight[3].detach().clone())
            elif doing == "write":
                run.table.weight.data[following[0]] = 0.5
            elif doing == "state":
                state = run.optimizer.state_dict()["state"][0]
                run.losses += [state[name].sum() for name in state if name.startswith("exp_avg_sq")]
            elif doing == "eval":
                with torch.no_grad():
                    run.losses.append(run.table(ids).sum())
    assert_same(plain, ahead)


class Held:
    """A step of which the worker has made the first part and not the rest, until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, make: Callable[..., Any] = OPTIMIZERS["SparseAdam"]) -> None:
        self.run, self.plain = Run(make), Run(make)
        self.ids, self.following = torch.arange(10), torch.arange(5, 15)
        self.may_go_on, self.fails = threading.Event(), False
        usual = kernels._step_part
        parts = iter(range(1000))

        def held(*args: Any) -> int:
            if next(parts) % 2:
                self.may_go_on.wait(60)
                if self.fails:
                    raise MemoryError("no room")
            return usual(*args)

        monkeypatch.setattr(kernels, "_step_part", held)
        for run in (self.plain, self.run):
            run.back(self.ids)
            if run is self.run:
                run.table.prefetch(self.following)
            run.optimizer.step()
            run.optimizer.zero_grad()

    def let_go_soon(self) -> None:
        threading.Timer(0.2, self.may_go_on.set).start()


TOUCHES: dict[str, Callable[[Run], Any]] = {
    "weight": lambda run: run.table.weight.detach().clone(),
    "a row": lambda run: run.table.weight[3].detach().clone(),
    "lookup": lambda run: run.table(torch.arange(4)).detach(),
    "state_dict": lambda run: run.table.state_dict()["weight"].clone(),
    "optimizer": lambda run: run.optimizer.state_dict()["state"][0]["exp_avg"].clone(),
    "state": lambda run: run.optimizer.state[run.table.weight]["exp_avg_sq"].sum(),
    "deepcopy": lambda run: copy.deepcopy(run.table).weight.detach(),
    "pickle": lambda run: pickle.loads(pickle.dumps(run.table)).weight.detach(),
    "grow": lambda run: run.optimizer.grow(run.table.weight, 2, torch.zeros(2, DIM)),
    "reset": lambda run: run.optimizer.reset_rows(run.table.weight, torch.arange(4)),
    "step": lambda run: run.step(torch.arange(8), run.optimizer),
    "torch's": lambda run: run.step(torch.arange(8), torch.optim.SparseAdam(run.table.parameters())),
    "sync": lambda run: storage.sync() if late_parts(run) else None,
}


@pytest.mark.parametrize("touch", TOUCHES)
@pytest.mark.parametrize("options", ["SparseAdam", "DeferredAdam"])
def test_whoever_touches_the_table_waits(options: str, touch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch, OPTIMIZERS[options])
    expected = TOUCHES[touch](held.plain)
    assert late_parts(held.run)
    held.let_go_soon()
    found = TOUCHES[touch](held.run)
    if isinstance(expected, Tensor):
        assert torch.equal(found, expected)
    assert_same(held.plain, held.run)


def test_the_announced_rows_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    assert torch.equal(held.run.table(held.following), held.plain.table(held.following))
    assert late_parts(held.run)  # which would wait for a minute
    held.may_go_on.set()


def test_an_error_is_told_once_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    held.fails = True
    held.may_go_on.set()
    with pytest.raises(RuntimeError, match="some of its rows have not moved: MemoryError"):
        held.run.optimizer.state_dict()
    held.fails = False
    held.run.optimizer.state_dict()
    for ids in batches(3, 0.5):
        held.run.table.prefetch(ids)
        held.run.back(ids)
        held.run.optimizer.step()


def test_an_error_that_is_known_is_told_by_the_next_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    held.fails = True
    held.may_go_on.set()
    _ahead.of_table(held.run.table.weight).wait()
    with pytest.raises(RuntimeError, match="some of its rows have not moved: MemoryError"):
        held.run.table(held.following)


def test_no_rows_that_were_read_before_an_error_are_used_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(OPTIMIZERS["SparseAdam"])
    following = [torch.arange(5), torch.arange(3, 8)]
    for _ in range(2):
        for ids in following:
            run.table.prefetch(ids)
        run.step(torch.arange(10), run.optimizer)
    usual = kernels._step_part

    def fail(*args: Any) -> int:
        usual(*args)
        raise MemoryError("no room")

    monkeypatch.setattr(kernels, "_step_part", fail)
    for ids in following:
        run.table.prefetch(ids)
    run.optimizer.step()
    with pytest.raises(RuntimeError, match="MemoryError"):
        run.table(following[0])
    assert torch.equal(run.table(following[1]), run.table.weight[following[1]])


def test_an_error_of_one_table_does_not_cut_short_the_step_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a program ends, for instance."""
    first = Held(monkeypatch)
    first.fails = True
    first.may_go_on.set()
    _ahead.of_table(first.run.table.weight).wait()
    first.fails = False
    second = Held(monkeypatch)
    second.let_go_soon()
    with pytest.raises(RuntimeError, match="MemoryError"):
        _ahead.finish_all()
    assert not late_parts(second.run)
    assert_same(second.plain, second.run)


@pytest.mark.parametrize("options", ["SparseAdam", "DeferredAdam"])
def test_a_table_that_nobody_has_any_more_is_let_go(options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And with it the lock of its file."""
    held = Held(monkeypatch, OPTIMIZERS[options])
    weight, optimizer = weakref.ref(held.run.table.weight), weakref.ref(held.run.optimizer)
    ahead = _ahead.of_table(held.run.table.weight)
    del held.run
    assert weight() is not None  # or the worker would step freed memory
    held.may_go_on.set()
    ahead.wait()
    gc.collect()  # what defers the rows of a table and the table know each other
    assert weight() is None
    assert optimizer() is None


def test_an_optimizer_that_ends_while_its_step_is_made_leaves_no_row_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch, OPTIMIZERS["DeferredAdam"])
    held.let_go_soon()
    for run in (held.plain, held.run):
        del run.optimizer
    assert torch.equal(held.run.table.weight, held.plain.table.weight)


def test_a_write_behind_the_back_of_rows_that_wait_is_refused() -> None:
    run = Run(OPTIMIZERS["DeferredAdam"])
    alias = run.table.weight.detach()
    for ids in batches(3, 0.5):
        run.table.prefetch(torch.arange(5))
        run.step(ids, run.optimizer)
    alias[0] = 1
    with pytest.raises(RuntimeError, match="written to through another tensor that shares its memory"):
        run.optimizer.state_dict()


def test_skipped_rows_are_those_of_the_whole_step(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(OPTIMIZERS["skips"])
    for _ in range(2):
        run.table.prefetch(torch.arange(2))
        run.back(torch.arange(10), float("nan"))
        run.optimizer.step()
        run.optimizer.zero_grad()
    assert run.optimizer.skipped_rows == 20


def test_an_interrupt_while_somebody_waits_leaves_the_step_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    threading.Timer(0.2, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        held.run.optimizer.state_dict()
    held.may_go_on.set()
    assert_same(held.plain, held.run)


def test_an_interrupt_leaves_the_lock_to_other_threads() -> None:
    """Python handles signals when a function begins and after a call into C."""
    run, was_interrupted, at = Run(OPTIMIZERS["SparseAdam"]), True, 0
    lock = run.optimizer._bare_lock
    while was_interrupted:
        was_interrupted, at, points = False, at + 1, itertools.count(1)

        def interrupt(frame: Any, event: str, _: Any, at: int = at, points: Iterator[int] = points) -> None:
            if frame.f_code.co_filename == _ahead.__file__ and event in ("call", "c_return") and next(points) == at:
                raise KeyboardInterrupt

        run.table.prefetch(torch.arange(5))
        run.back(torch.arange(10))
        run.optimizer.step()
        sys.setprofile(interrupt)
        try:
            with run.optimizer._lock:
                pass
        except KeyboardInterrupt:
            was_interrupted = True
        finally:
            sys.setprofile(None)
        with ThreadPoolExecutor(1) as other:
            assert other.submit(lambda: lock.acquire(blocking=False) and not lock.release()).result(), at
    assert at > 10


def test_a_forked_process_has_the_whole_step_and_can_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    held.let_go_soon()
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            same = all(map(torch.equal, held.run.table.parameters(), held.plain.table.parameters()))
            for run in (held.plain, held.run):
                run.table.prefetch(held.following)
                run.back(held.following)
                run.optimizer.step()
            same &= all(map(torch.equal, held.run.table.parameters(), held.plain.table.parameters()))
            os._exit(0 if same else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_program_that_ends_makes_its_last_step(tmp_path: Path) -> None:
    program = f"""
import torch
from rowstep import HostEmbedding, SparseAdam
table = HostEmbedding(1000, 8, device="cpu", path={str(tmp_path / "table.safetensors")!r})
torch.nn.init.ones_(table.weight)
optimizer = SparseAdam(table.parameters(), lr=0.5)
table.prefetch(torch.arange(4))
table(torch.arange(1000)).sum().backward()
optimizer.step()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
    with pytest.warns(UserWarning, match="not clean"):
        weight = storage.open(tmp_path / "table.safetensors", "weight")
    assert torch.allclose(weight, torch.full((1000, 8), 0.5))  # or it is 1 still


def test_a_forked_process_of_multiprocessing_makes_its_last_step() -> None:
    """Such processes end without the functions of atexit."""
    run = Run(OPTIMIZERS["SparseAdam"])
    run.table.share_memory()
    before = run.table.weight.detach().clone()

    def train() -> None:
        run.table.prefetch(torch.arange(5))
        run.back(torch.arange(ROWS))
        run.optimizer.step()

    child = multiprocessing.get_context("fork").Process(target=train)
    child.start()
    child.join()
    assert child.exitcode == 0
    assert (run.table.weight != before).all()


@pytest.mark.parametrize("is_optimizer_first", [False, True])
def test_copies_prefetch_as_well(is_optimizer_first: bool) -> None:
    run = Run(OPTIMIZERS["SparseAdam"])
    parts = [run.table, run.optimizer]
    run.table, run.optimizer = copy.deepcopy(parts[::-1])[::-1] if is_optimizer_first else copy.deepcopy(parts)
    for ids in prefetched(batches(3, 0.5), {run.table: lambda ids: ids}):
        run.step(ids, run.optimizer)
    assert isinstance(run.table.weight, Waiting)


def test_bags_padding_and_ids_of_32_bits() -> None:
    runs = [Run(OPTIMIZERS["SparseAdam"], mode="sum", padding_idx=3) for _ in range(2)]
    loader = [ids.int() for ids in batches(10, 0.5)]
    for run, source in zip(runs, (loader, prefetched(loader, {runs[1].table: lambda ids: [ids]})), strict=True):
        for ids in source:
            run.step(ids, run.optimizer)
    assert_same(*runs)


def test_a_table_with_max_norm_is_read_when_it_is_looked_up() -> None:
    runs = [Run(OPTIMIZERS["DeferredAdam"], max_norm=1.0) for _ in range(2)]
    loader = batches(20, 0.5)
    for run, source in zip(runs, (loader, prefetched(loader, {runs[1].table: lambda ids: ids})), strict=True):
        for ids in source:
            run.step(ids, run.optimizer)
    assert_same(*runs)


def test_only_ids_can_be_announced() -> None:
    table = HostEmbedding(ROWS, DIM, device="cpu")
    with pytest.raises(TypeError, match=r"ids is a list; expected a tensor of torch\.int64 or torch\.int32"):
        table.prefetch([1, 2])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"ids is a tensor of torch\.float32"):
        table.prefetch(torch.ones(2))
    table.prefetch(torch.tensor([ROWS]))
    with pytest.raises(IndexError, match=f"id {ROWS} is outside the table"):
        table(torch.tensor([ROWS]))


def test_what_is_announced_may_be_written_over_and_is_forgotten_if_it_is_not_used() -> None:
    run = Run(OPTIMIZERS["SparseAdam"])
    ids = torch.arange(4)
    run.table.prefetch(ids)
    ids += 10
    assert torch.equal(run.table(ids), run.table.weight[10:14])
    for _ in range(5):
        run.back(ids)
        run.optimizer.step()
    assert not _ahead.of_table(run.table.weight).announced
    assert type(run.table.weight.detach().requires_grad_()) is Tensor


def test_many_batches_can_be_announced_and_the_last_ones_are_kept() -> None:
    runs = [Run(OPTIMIZERS["SparseAdam"]) for _ in range(2)]
    loader = batches(30, 0.5)
    for ids in loader:
        runs[1].table.prefetch(ids)
    assert [batch.ids.tolist() for batch in _ahead.of_table(runs[1].table.weight).announced] == [
        ids.tolist() for ids in loader[-_ahead._MOST_ANNOUNCED :]
    ]
    for run in runs:
        for ids in loader:
            run.step(ids, run.optimizer)
    assert_same(*runs)


def test_rows_catch_up_for_a_call_as_they_would_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left to do after a step is not seen by the watch, which would bring all rows up to date."""
    held = Held(monkeypatch, OPTIMIZERS["DeferredAdam"])
    held.let_go_soon()
    for run in (held.plain, held.run):
        run.optimizer.catch_up(run.table.weight, torch.tensor([40]))
    notes = [run.optimizer._tables[id(run.table.weight)].pending.notes for run in (held.plain, held.run)]
    assert torch.equal(*notes)
    assert_same(held.plain, held.run)


def test_tables_over_the_same_memory_step_one_after_the_other() -> None:
    runs = []
    for ahead in (False, True):
        rows = torch.ones(ROWS, DIM)
        tables = [HostEmbedding.from_pretrained(rows, freeze=False, device="cpu") for _ in range(2)]
        optimizer = SparseAdam([table.weight for table in tables], lr=0.1)
        loader = batches(20, 0.5)
        for ids in prefetched(loader, dict.fromkeys(tables, lambda ids: ids)) if ahead else loader:
            optimizer.zero_grad()
            sum(table(ids).square().sum() for table in tables).backward()
            optimizer.step()
        runs.append(rows)
    assert torch.equal(*runs)

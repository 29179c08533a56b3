"""Steps in forked processes, where the threads of the parent do not exist."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from numba import config
from torch.nn import functional as F  # noqa: N812  # as torch's own documents have it

from rowstep import DeferredAdam, HostEmbedding, SparseAdam, _ahead
from rowstep._kernels import internals, pool
from tests.helpers.deferred_cases import only_long

PARENT = """
import os, signal, sys, threading
import numba, numpy as np, torch
from rowstep import SparseAdam

torch.manual_seed(0)
torch.set_num_threads(1)  # torch's own threads do not survive a fork either
gradient = torch.sparse_coo_tensor(
    torch.randint(2000, (1, 3000)), torch.randn(3000, 32), (2000, 32), check_invariants=True
)
param = torch.nn.Parameter(torch.randn(2000, 32))
param.grad = gradient
optimizer = SparseAdam([param])
shared = torch.zeros(2000, 32).share_memory_()

def step():
    torch.set_num_threads(2)
    optimizer.step()
    assert torch.get_num_threads() == 2  # though Numba's OpenMP sets it when its threads start
    torch.set_num_threads(1)

def step_and_tell():
    signal.alarm(120)  # rather than hang for ever
    step()
    shared.copy_(param.detach())

def in_a_fork(work):
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

def held_by_another_thread():
    from rowstep._kernels import pool
    held, done = threading.Event(), threading.Event()
    def hold():
        with pool._one_at_a_time:
            held.set()
            done.wait()
    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        in_a_fork(step_and_tell)
    finally:
        done.set()
        thread.join()

def compare(children):
    results = []
    for child in children:
        shared.zero_()
        child()
        results.append(shared.clone())
    step()
    assert results and all(torch.equal(result, param) for result in results)
"""

STEPS_BEFORE = """
step()
compare([
    lambda: in_a_fork(step_and_tell),
    lambda: in_a_fork(lambda: in_a_fork(step_and_tell)),
    held_by_another_thread,
])
print(numba.threading_layer())
"""

OTHER_NUMBA_CODE_BEFORE = """
numba.get_num_threads()  # starts them, and lets torch have as many
torch.set_num_threads(1)
compare([lambda: in_a_fork(step_and_tell)])
print(numba.threading_layer())
"""


@pytest.mark.parametrize(
    ("before", "layer"),
    [
        (STEPS_BEFORE, "omp"),
        pytest.param(STEPS_BEFORE, "workqueue", marks=only_long),
        pytest.param(OTHER_NUMBA_CODE_BEFORE, "omp", marks=only_long),
    ],
    ids=["steps, omp", "steps, workqueue", "other Numba code"],
)
def test_a_forked_process_steps_with_the_same_bits(before: str, layer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROWSTEP_BACKEND", "numba")
    monkeypatch.setenv("NUMBA_THREADING_LAYER", layer)
    monkeypatch.setenv("NUMBA_NUM_THREADS", "3")
    done = subprocess.run([sys.executable, "-c", PARENT + before], capture_output=True, text=True, check=False)
    if "No threading layer could be loaded" in done.stderr:
        pytest.skip(f"Numba has no layer {layer} here")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [layer]


def test_one_thread_of_numbas_needs_no_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "NUMBA_NUM_THREADS", 1)
    monkeypatch.setattr(internals, "pool_address", lambda: pytest.fail("threads were started"))
    assert pool._pool() == 0


def test_a_launch_may_happen_during_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal handler that saves a checkpoint, while the same thread compiles."""
    launched: list[str] = []

    def inner(*arguments: Any) -> None:
        launched.append("inner")

    def outer(*arguments: Any) -> None:
        launch(inner)
        launched.append("outer")

    def launch(work: Any) -> None:
        kernel: Any = pool.OverThreads(SimpleNamespace(address=1), None)  # type: ignore[arg-type]
        kernel._run(2, work)

    on_pool = SimpleNamespace(call=lambda pool, threads, parts, address, work: work())
    monkeypatch.setattr(pool, "_on_pool", on_pool)

    thread = threading.Thread(target=launch, args=(outer,), daemon=True)
    thread.start()
    thread.join(60)
    assert launched == ["inner", "outer"]


def in_a_child(work: Callable[[], object]) -> None:
    """Do it in a forked process, which must come to its end."""
    child = os.fork()
    if not child:
        signal.alarm(60)
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@contextmanager
def another_thread_in(lock: Any) -> Iterator[None]:
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(60)
    try:
        yield
    finally:
        done.set()
        thread.join()


TOUCHES: dict[str, Callable[[Any, Any], object]] = {
    "step": lambda table, optimizer: optimizer.step(),
    "state_dict": lambda table, optimizer: optimizer.state_dict(),
    "reset_rows": lambda table, optimizer: optimizer.reset_rows(table.weight, torch.arange(2)),
}
READS: dict[str, Callable[[Any, Any], object]] = {
    "lookup": lambda table, optimizer: table(torch.arange(4)),
    "F.embedding": lambda table, optimizer: F.embedding(torch.arange(4), table.weight),
    "row": lambda table, optimizer: table.weight[3],
}


@pytest.mark.parametrize("make", [SparseAdam, DeferredAdam])
@pytest.mark.parametrize("kind", [torch.nn.Embedding, HostEmbedding])
def test_a_fork_while_another_thread_steps_is_told_once(make: Any, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROWSTEP_BACKEND", "numba")
    is_host, everything = kind is HostEmbedding, TOUCHES | READS
    table = HostEmbedding(9, 2, device="cpu") if is_host else kind(9, 2, sparse=True)
    optimizer = make(table.parameters())
    for _ in range(2):
        table(torch.arange(5)).sum().backward()
        if is_host:
            table.prefetch(torch.arange(3))
        optimizer.step()
        optimizer.zero_grad()

    def do_all() -> None:
        for touch in everything.values():
            touch(table, optimizer)

    def told_at(touch: Callable[[Any, Any], object]) -> None:
        with pytest.raises(RuntimeError, match=f"forked while another thread used its {make.__name__}"):
            touch(table, optimizer)
        do_all()

    with another_thread_in(optimizer._bare_lock):
        for touch in (everything if is_host or make is DeferredAdam else TOUCHES).values():
            in_a_child(functools.partial(told_at, touch))
        in_a_child(lambda: in_a_child(lambda: told_at(TOUCHES["step"])))
    with optimizer._lock:  # a signal handler that forks in the middle of a step
        in_a_child(do_all)
    in_a_child(do_all)


def test_a_fork_while_another_thread_gives_the_worker_a_step_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROWSTEP_BACKEND", "numba")
    table = HostEmbedding(9, 2, device="cpu")
    optimizer = SparseAdam(table.parameters())
    table.prefetch(torch.arange(3))
    table(torch.arange(5)).sum().backward()
    optimizer.step()
    table.prefetch(torch.arange(4))
    optimizer.step()
    _ahead.finish_all()
    ahead, done = _ahead.of_table(table.weight), threading.Event()

    def held() -> None:
        done.wait(60)

    def told() -> None:
        monkeypatch.undo()
        with pytest.raises(RuntimeError, match=r"could not be completed; .* while this process was forked"):
            table(torch.arange(4))
        table.prefetch(torch.arange(3))
        optimizer.step()
        assert torch.equal(table(torch.arange(3)), table.weight[:3])

    monkeypatch.setattr(ahead, "wait", lambda: None)  # as if the step came right after that
    ahead._give(_ahead._Order(held, is_step=True))
    try:
        in_a_child(told)
    finally:
        done.set()

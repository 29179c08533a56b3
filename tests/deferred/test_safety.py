"""Rows that were read before they were up to date are an error that changes nothing, and there are ways to avoid it."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import textwrap
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from rowstep import DeferredAdam, DeferredAdamW, SparseAdam, StaleRowsError
from rowstep._backends import reference
from rowstep._deferred.deferral import flush_orphans
from rowstep._kernels import pool
from rowstep._kernels.cache import Kernel
from tests.helpers.deferred_cases import BAR, Forward, distance, embedding, in_memory, step_caught_up, waiting, zipf
from tests.helpers.gradients import Snapshot, rows_of, step_with, table

pytestmark = pytest.mark.usefixtures("backend")


def unseen(ids: Tensor) -> Forward:
    """A lookup that the optimizer does not hear of."""

    def look_up(model: Any) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return functional.embedding(ids, model.weight, sparse=model.sparse)

    return look_up


def test_a_stale_read_is_an_error_that_names_the_ways_out() -> None:
    params = [table(4, 2), table(9, 2), nn.Parameter(torch.ones(3))]
    named = list(zip(("items", "users", "bias"), params, strict=True))
    groups: list[dict[str, Any]] = [{"params": named[:1]}, {"params": named[1:], "lr": 0.1}]
    optimizer = DeferredAdam(groups)

    def step(*ids: int) -> None:
        params[0].grad, params[1].grad = rows_of(params[0], [0, 1]), rows_of(params[1], ids)
        params[2].grad = torch.ones(3)
        optimizer.step()

    step(1, 2, 3)
    step(1, 2, 3)
    before = Snapshot(optimizer)
    message = (
        r"parameter 0 of group 1 \('users'\): 3 of the gradient's 5 rows were not up to date when they were read; "
        r"expected .*opt\.catch_up\(param, ids\) or opt\.flush\(param\) before such a read"
    )
    for _ in range(2):
        with pytest.raises(StaleRowsError, match=message):
            step(1, 7, 2, 7, 8)
        before.assert_unchanged()
    step(1, 2, 3)
    assert [int(optimizer.state[param]["step"]) for param in params] == [3, 3, 3]


@pytest.mark.parametrize("way", ["catch_up", "flush", "flush one"])
def test_reads_that_are_not_seen(way: str) -> None:
    twins = waiting()
    weight = twins.model.weight
    for _ in range(20):
        ids = zipf(40, 6).flip(0).reshape(2, 3)
        if way == "catch_up":
            twins.ours.catch_up(weight, ids)
        elif way == "flush":
            twins.ours.flush()
        else:
            twins.ours.flush(weight)
        twins.step(unseen(ids))
    twins.assert_same()


@pytest.mark.parametrize("allow_stale", [False, True])
def test_a_gradient_that_comes_a_step_late(allow_stale: bool) -> None:
    """Its rows were up to date when they were read and are not any more: refused, or dense Adam's."""
    twins = waiting(weight_decay=0.1, lr=0.01, allow_stale=allow_stale)
    late = [(model(torch.tensor([35])).sum(), model) for model in (twins.model, twins.twin)]
    twins.look_up(1, 2)
    twins.each(lambda model, optimizer: optimizer.zero_grad())
    for read, _ in late:
        read.backward()
    if allow_stale:
        twins.each(lambda model, optimizer: optimizer.step())
    else:
        with pytest.raises(StaleRowsError, match="1 of the gradient's 1 rows"):
            twins.ours.step()
    twins.assert_same()


@pytest.mark.parametrize("ids", [[40], [-1], [3, 41, 2]])
def test_ids_outside_of_the_table(ids: list[int]) -> None:
    twins = waiting()
    before = Snapshot(twins.ours)
    outside = next(number for number in ids if not 0 <= number < 40)
    with pytest.raises(IndexError, match=f"id {outside} is outside the table; expected 0 <= id < 40"):
        twins.ours.catch_up(twins.model.weight, torch.tensor(ids))
    before.assert_unchanged()


def test_a_parameter_of_someone_else() -> None:
    optimizer = DeferredAdamW([table(3, 2)])
    for call in (lambda param: optimizer.catch_up(param, torch.tensor([0])), optimizer.flush):
        with pytest.raises(ValueError, match=r"the parameter of shape \(4, 2\) does not belong to this optimizer"):
            call(table(4, 2))


def test_only_a_step_counts_as_a_write() -> None:
    """Autograd must accept a graph that read the rows which were brought up to date, and refuse one before a step."""
    twins = waiting()
    weight = twins.model.weight
    version = weight._version
    twins.ours.catch_up(weight, torch.tensor([35]))
    twins.model(torch.tensor([36]))
    twins.ours.flush()
    assert weight._version == version
    kept = (weight**2).sum()
    twins.look_up(1)
    assert weight._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.backward()


@pytest.mark.parametrize("change", [{}, {"betas": (0.8, 0.99)}, {"eps": 1e-4}, {"amsgrad": True}], ids=str)
def test_a_stale_read_is_noticed_after_options_have_changed_or_if_all_is_read(change: dict[str, Any]) -> None:
    """As a schedule of the betas does between a backward pass and its step, or in a dense gradient."""
    twins = waiting()
    twins.ours.zero_grad()
    with torch._C.DisableTorchFunctionSubclass():
        read = unseen(torch.tensor([35]))(twins.model) if change else twins.model.weight.square()
        torch.autograd.backward(read.sum())
    twins.ours.param_groups[0].update(change)
    with pytest.raises(StaleRowsError, match=r"of the gradient's (1|40) rows"):
        twins.ours.step()


def test_rows_to_catch_up_may_be_a_mask_and_must_be_numbers() -> None:
    twins = waiting()
    mask = torch.zeros(40, dtype=torch.bool)
    mask[35] = True
    twins.ours.catch_up(twins.model.weight, mask)
    assert distance(twins.model.weight[35], twins.twin.weight[35]) <= BAR
    with pytest.raises(ValueError, match="the mask has 39 entries; expected 40, one per row"):
        twins.ours.catch_up(twins.model.weight, mask[1:])
    wrong: list[Any] = [torch.tensor([3.9]), [1], torch.tensor([1j])]
    for ids in wrong:
        with pytest.raises(TypeError, match="expected an integer tensor or a boolean mask"):
            twins.ours.catch_up(twins.model.weight, ids)


INVALID_IDS = {
    "outside": torch.tensor([3, 40]),
    "negative": torch.tensor([-1]),
    "a mask": torch.ones(40, dtype=torch.bool),
    "a mask that is too short": torch.ones(3, dtype=torch.bool),
    "floats": torch.tensor([1.0]),
    "int16": torch.tensor([1], dtype=torch.int16),
    "no tensor": [1, 2],
}


@pytest.mark.parametrize("name", INVALID_IDS)
def test_a_lookup_with_invalid_ids_raises_torchs_error(name: str) -> None:
    twins, ids = waiting(), INVALID_IDS[name]
    with pytest.raises((IndexError, RuntimeError, TypeError)) as torchs:
        functional.embedding(ids, torch.zeros(40, 4))  # type: ignore[arg-type]
    with pytest.raises(torchs.type, match=re.escape(str(torchs.value))):
        functional.embedding(ids, twins.model.weight)  # type: ignore[arg-type]
    twins.run(3, rows=40)
    twins.assert_same()


def in_a_thread(drop: Any) -> None:
    thread = threading.Thread(target=drop)
    thread.start()
    thread.join()


def in_another_step(drop: Any) -> None:
    """Of a layer: that of a table might have to compile."""
    layer = nn.Parameter(torch.ones(3))
    optimizer, count = SparseAdam([layer]), SparseAdam._count
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SparseAdam, "_count", lambda self, jobs: (drop(), count(self, jobs)))
        step_with(optimizer, layer, torch.ones(3))


def while_threads_are_at_work(drop: Any) -> None:
    """Those of another launch, which somebody else waits for."""
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with pool._one_at_a_time:
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        in_a_thread(drop)
    finally:
        done.set()
        thread.join()


@pytest.mark.parametrize("where", [in_a_thread, in_another_step, while_threads_are_at_work])
@pytest.mark.parametrize("has_run", [True, False], ids=["a kernel that has run", "no kernel"])
def test_a_dropped_optimizer_flushes_by_a_kernel_that_has_run_or_by_none(
    where: Any, has_run: bool, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without compiling or waiting, wherever garbage collection comes."""
    monkeypatch.setattr(pool, "PARALLEL_FROM_BYTES", 1)
    torch.set_num_threads(2)
    models = [nn.Embedding(3000, 4, sparse=True) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers: list[Any] = [DeferredAdamW(model.parameters(), lr=0.1) for model in models]
    for ids in (range(3000), range(9), range(9)):
        gradient = rows_of(models[0].weight, list(ids))
        for model, optimizer in zip(models, optimizers, strict=True):
            step_caught_up(optimizer, model.weight, gradient.clone())
    optimizers[1].flush()
    if not has_run:
        optimizers[0]._tables[id(models[0].weight)].pending.kernel = None
    elif backend == "numba":
        monkeypatch.setattr(reference, "catch_up", lambda *_: pytest.fail("the reference is slow"))
    monkeypatch.setattr(Kernel, "_compiled", lambda self: pytest.fail("it compiles"))
    cycle = [optimizers.pop(0)]
    cycle.append(cycle)
    del cycle, optimizer
    where(gc.collect)
    assert type(models[0].weight) is nn.Parameter
    if has_run:
        assert torch.equal(*(model.weight for model in models))
    else:
        torch.testing.assert_close(*(model.weight for model in models))


def test_a_forked_process_leaves_rows_in_shared_memory_to_its_parent() -> None:
    torch.set_num_threads(1)
    twins = waiting(embedding().share_memory())
    before = in_memory(twins.model.weight)
    child = os.fork()
    if child == 0:
        refused = 0
        try:
            for read in (
                lambda: twins.model(torch.tensor([35])),
                twins.ours.flush,
                twins.ours.state_dict,
                lambda: step_with(twins.ours, twins.model.weight, rows_of(twins.model.weight, [0])),
            ):
                with pytest.raises(RuntimeError, match=r"opt\.flush\("):
                    read()
                refused += 1
            twins.ours.__del__()
        finally:
            os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
    assert torch.equal(in_memory(twins.model.weight), before)
    twins.run(3, rows=40)
    twins.assert_same()


def test_rows_may_wait_when_the_interpreter_exits() -> None:
    program = """
        import torch
        from rowstep import DeferredAdamW
        model = torch.nn.Embedding(300, 4, sparse=True)
        for _ in range(2):
            optimizer = DeferredAdamW(model.parameters())
            for _ in range(3):
                model(torch.arange(9)).sum().backward()
                optimizer.step()
            cycle = [optimizer]
            cycle.append(cycle)
    """
    source = textwrap.dedent(program)
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_finalizer_sets_no_context_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not NumPy's error state: garbage collection comes in the middle of anything, and where that is the end of another
    np.errstate, CPython 3.11 goes on with a state that is freed.
    """

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("np.errstate was asked for")

    model = embedding(6)
    optimizer = DeferredAdam(model, lr=0.1, betas=(0.5, 0.3))  # whose e grow past float64
    for ids in (range(6), *[[0]] * 30):
        optimizer.catch_up(model.weight, torch.tensor(list(ids)))
        step_with(optimizer, model.weight, rows_of(model.weight, list(ids), 1e-9))
    waiting = [table.pending for table in optimizer._tables.values()]
    monkeypatch.setattr(np, "errstate", refuse)
    flush_orphans(waiting)
    assert not (waiting[0].notes < waiting[0].schedule.step).any()

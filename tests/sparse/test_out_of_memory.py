"""Memory that runs out in the middle: a parameter has taken its step whole or not at all, and the next step works."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rowstep import _schedule
from tests.helpers.deferred_cases import LONG, Twins, embedding, only_long
from tests.helpers.whole_steps import OPTIONS, Run, assert_on_its_way, trajectories

# What a full memory looks like from torch, and from NumPy.
NO_MEMORY = (RuntimeError, MemoryError)

# They take no memory. In a mode as below, torch does not note that the first of them has changed a tensor.
IN_PLACE = ("aten._foreach_add_.Scalar", "aten._fused_adam_.default", "aten._fused_adamw_.default")


class Scarcity(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Memory that runs out at the ``at``-th operation of torch; at none, it counts them."""

    def __init__(self, at: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations, self._at = 0, at

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func) not in IN_PLACE:
            self.operations += 1
            if self.operations == self._at:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return func(*args, **(kwargs or {}))


def after_scarcity(prepare: Callable[[], Any], action: Callable[[Any], object]) -> Iterator[Any]:
    """The world that ``prepare`` makes, after memory ran out at one operation of an action, for many of them."""
    world = prepare()
    with Scarcity() as counter:
        action(world)
    assert counter.operations > 3
    for at in range(1, counter.operations + 1, 1 if LONG else counter.operations // 15 + 1):
        world = prepare()
        with pytest.raises(NO_MEMORY, match="allocate"), Scarcity(at):
            action(world)
        yield world


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("name", OPTIONS)
def test_memory_that_runs_out_in_a_step(name: str) -> None:
    expected, start, taken = trajectories(name, 3), Run(name).counts(), set()
    for run in after_scarcity(lambda: Run(name), Run.step):
        after = run.counts()
        assert all(count in (before, before + 1) for before, count in zip(start, after, strict=True))
        taken.add(tuple(after))
        assert_on_its_way(run, expected)
        run.step()
        run.step()
        assert_on_its_way(run, expected)
    assert len(taken) >= 2


@pytest.mark.parametrize("action", ["flush", "state_dict", "catch_up", "betas"])
def test_memory_that_runs_out_while_rows_catch_up(action: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROWSTEP_BACKEND", "reference")  # the kernels ask torch for nothing
    expected = trajectories("decayed", 2)

    def act(run: Run) -> None:
        if action == "catch_up":
            run.optimizer.catch_up(run.params[0], torch.tensor([5, 0, 5]))
        elif action == "betas":
            run.optimizer.param_groups[0]["eps"] = 1e-8  # the same, as another object
            run.optimizer.flush()
        else:
            getattr(run.optimizer, action)()

    for run in after_scarcity(lambda: Run("decayed"), act):
        assert_on_its_way(run, expected)
        run.step()
        assert_on_its_way(run, expected)


def test_a_step_that_could_not_be_counted_is_counted_later_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if a schedule has changed the learning rate in the meantime."""
    twins = Twins(embedding(6), lr=0.1)
    twins.look_up(*range(6))
    left = 3

    def advance(self: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal left
        left -= 1
        if left >= 0:
            raise MemoryError("no room for the schedule")
        real(self, *args, **kwargs)

    real = _schedule.Schedule.advance
    with monkeypatch.context() as patch:
        patch.setattr(_schedule.Schedule, "advance", advance)
        with pytest.raises(MemoryError, match="no room"):
            twins.look_up(1, 2)  # torch's side has not stepped
        twins.theirs.step()
        twins.set(lr=0.5)
        with pytest.raises(MemoryError, match="no room"):
            twins.ours.flush()
    for _ in range(3):
        twins.look_up(0, 2)
    twins.look_up(3)
    twins.assert_same()


ROOM = """
import resource, sys, torch
from rowstep import SparseAdam, DeferredAdam
torch.set_num_threads(2)
cls = {"SparseAdam": SparseAdam, "DeferredAdam": DeferredAdam}[sys.argv[1]]
SIZE = 1 << 21  # numbers in a table: 8 MB

def make():
    params = [torch.nn.Parameter(torch.ones(SIZE // 4, 4)) for _ in range(3)]
    for number, param in enumerate(params):
        ids = torch.arange(0, SIZE // 4, 97).flip(0)
        values = torch.full((len(ids), 4), number + 1.0)
        param.grad = torch.sparse_coo_tensor(ids[None], values, param.shape, check_invariants=False)
    return params, cls(params, lr=0.1)

def read(param):
    return param.detach()[::97][:3].tolist()

def used():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmSize")) << 10

params, optimizer = make()
optimizer.step()  # compiles, and starts threads
expected = [read(param) for param in params]
del params, optimizer
failed = []
for megabytes in range(0, 128, 8):
    params, optimizer = make()
    limit = used() + (megabytes << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    try:
        optimizer.step()
        assert megabytes
        error = None
    except (MemoryError, RuntimeError) as raised:
        error = raised
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    stepped = [int(optimizer.state[param].get("step", 0)) for param in params]
    for param, count, end in zip(params, stepped, expected):
        assert read(param) == (end if count else [[1.0] * 4] * 3), (megabytes, stepped, error)
        if count:
            param.grad = None
    optimizer.step()
    assert [read(param) for param in params] == expected
    failed.append(0 if error is None else 1)
    if error is None:
        break
    assert "memory" in str(error).lower(), error
    getattr(optimizer, "_deferrals", {}).clear()  # else the waiting rows would be brought up to date when it is dropped
    del params, optimizer, error
print(sum(failed))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a limit on memory needs Linux")
@pytest.mark.parametrize("name", ["SparseAdam", pytest.param("DeferredAdam", marks=only_long)])
def test_a_limit_on_memory(name: str) -> None:
    """From none on, until there is enough for a whole step: one table after the other gets its moments."""
    environment = os.environ | {"ROWSTEP_BACKEND": "numba"}
    command = [sys.executable, "-c", ROOM, name]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) >= 3

"""Which backend runs, what it compiles, and on how many threads."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numba
import numpy as np
import pytest
import torch
from torch.nn import Parameter

from rowstep import SparseAdam, _backends, arrays
from rowstep.arrays import _adam as arrays_adam
from tests.helpers.gradients import rows_of, step_with, table


def python(source: str) -> str:
    """Run this source in a fresh interpreter; return what it printed."""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


Step = Callable[[], Any]
"""One step with a learning rate of 0.5 and gradients of 1; returns the weights, which were 0."""


def stepping_a_tensor() -> Step:
    param = Parameter(torch.zeros(3, 2))
    param.grad = rows_of(param, range(3), 1.0)
    optimizer = SparseAdam([param], lr=0.5)
    return lambda: optimizer.step() or param.detach()


def stepping_an_array() -> Step:
    param, optimizer = np.zeros((3, 2), np.float32), arrays.Adam(lr=0.5)

    def step() -> Any:
        optimizer.step("param", param, np.ones((3, 2), np.float32))
        optimizer.end_iteration()
        return param

    return step


@pytest.fixture
def nothing_is_chosen_yet() -> Iterator[None]:
    """As in a new process: a backend is chosen once."""
    choices: tuple[Any, ...] = (_backends._load, arrays_adam._choose)
    for choice in choices:
        choice.cache_clear()
    yield
    for choice in choices:
        choice.cache_clear()


@pytest.mark.usefixtures("nothing_is_chosen_yet")
@pytest.mark.parametrize("stepping", [stepping_a_tensor, stepping_an_array])
@pytest.mark.parametrize(("reason", "word"), [("missing", "numba"), ("off", "NUMBA_DISABLE_JIT")])
def test_where_numba_cannot_be_used_the_reference_runs_and_one_warning_says_so(
    stepping: Callable[[], Step], reason: str, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the environment asks for Numba: then the step raises."""
    if reason == "off":
        monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    else:
        monkeypatch.setitem(sys.modules, "numba", None)
    step = stepping()
    monkeypatch.setenv("ROWSTEP_BACKEND", "numba")
    with pytest.raises((ImportError, RuntimeError), match=word):
        step()
    monkeypatch.delenv("ROWSTEP_BACKEND")
    with pytest.warns(RuntimeWarning, match=f"reference implementation.*{word}"):
        assert step()[1, 0] == pytest.approx(-0.5)
    assert step()[1, 0] == pytest.approx(-1.0)  # a second warning would be an error


@pytest.mark.parametrize("stepping", [stepping_a_tensor, stepping_an_array])
@pytest.mark.parametrize("name", ["Numba", "cuda", " "])
def test_an_unknown_backend_is_refused_and_nothing_changes(
    stepping: Callable[[], Step], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = stepping()
    monkeypatch.setenv("ROWSTEP_BACKEND", name)
    with pytest.raises(ValueError, match=rf"ROWSTEP_BACKEND is '{name}'; expected .*'numba' or 'reference'"):
        step()
    monkeypatch.setenv("ROWSTEP_BACKEND", "reference")
    assert step()[1, 0] == pytest.approx(-0.5)  # the first step, of a table that was as it had been


@pytest.mark.usefixtures("nothing_is_chosen_yet")
def test_triton_must_be_there_if_the_environment_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "rowstep._backends.triton", raising=False)
    monkeypatch.setenv("ROWSTEP_BACKEND", "triton")
    param = table(3, 2)
    optimizer = SparseAdam([param])
    with pytest.raises(ImportError, match="ROWSTEP_BACKEND is 'triton', but Triton cannot be used"):
        step_with(optimizer, param, rows_of(param, [1]))
    assert not optimizer.state


@pytest.mark.usefixtures("nothing_is_chosen_yet")
def test_without_triton_other_devices_take_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "rowstep._backends.triton", raising=False)
    for name in ("", "numba", "reference"):
        monkeypatch.setenv("ROWSTEP_BACKEND", name)
        assert _backends.kernels_for(torch.empty(3, 2, device="meta")) is None


def test_a_new_table_or_batch_size_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from rowstep._kernels import cache

    monkeypatch.setenv("ROWSTEP_BACKEND", "numba")
    torch.set_num_threads(2)

    def step(rows: int, columns: int, ids: int, **options: Any) -> None:
        param = Parameter(torch.zeros(rows, columns))
        step_with(SparseAdam([param], **options), param, rows_of(param, torch.randint(rows, (ids,))))

    step(100, 8, 20)
    step(100, 64, 2000)
    compiled = len(cache.records)
    assert compiled > 0
    for rows, columns, ids in ((1, 1, 5000), (1, 200, 2), (7, 3, 33), (5000, 16, 5000), (2**20, 2, 1)):
        step(rows, columns, ids)
    step(100, 8, 20, lr=0.5, betas=(0.0, 0.5), eps=1e-3)
    step(100, 8, 20, lr=torch.tensor([0.5]))
    assert len(cache.records) == compiled


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_are_used_as_torch_is_told_to(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from rowstep._kernels.pool import OverThreads

    monkeypatch.setenv("ROWSTEP_BACKEND", "numba")
    parallel_runs: list[int] = []
    monkeypatch.setattr(OverThreads, "_run", lambda self, parts, told_at: parallel_runs.append(parts))
    torch.set_num_threads(threads)
    for rows in (10, 5000):  # waking threads for ten rows would cost more than it saves
        param = Parameter(torch.zeros(rows, 32))
        step_with(SparseAdam([param]), param, rows_of(param, range(rows)))
    assert parallel_runs == [2] * (threads - 1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_table_on_a_gpu(backend: str) -> None:
    on_cpu = table(100, 8)
    on_gpu = Parameter(on_cpu.detach().cuda())
    optimizers = SparseAdam([on_cpu]), SparseAdam([on_gpu])
    for _ in range(5):
        grad = rows_of(on_cpu, torch.randint(100, (40,)))
        step_with(optimizers[0], on_cpu, grad)
        step_with(optimizers[1], on_gpu, grad.cuda())
    torch.testing.assert_close(on_gpu.cpu(), on_cpu, rtol=1e-5, atol=1e-6)

"""Which backend runs, what it imports and compiles, and that its numbers are IEEE arithmetic."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from rowstep import SparseAdam
from tests.helpers.gradients import Snapshot, rows_of, step_with, table


def python(source: str) -> str:
    """Run this source in a fresh interpreter; return what it printed."""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


ONE_STEP = """
import os, sys, warnings
import torch
from rowstep import SparseAdam
param = torch.nn.Parameter(torch.zeros(3, 2))
param.grad = torch.sparse_coo_tensor([[1]], torch.ones(1, 2), (3, 2), check_invariants=True)
optimizer = SparseAdam([param], lr=0.5)
"""


def test_numba_is_imported_by_the_first_step_that_needs_it() -> None:
    printed = python(
        "import os, sys, rowstep; print('numba' in sys.modules, 'llvmlite' in sys.modules)"
        + ONE_STEP
        + """
for backend in ("reference", ""):
    os.environ["ROWSTEP_BACKEND"] = backend
    optimizer = type(optimizer)(optimizer.param_groups[0]["params"])  # a table is prepared for one backend
    optimizer.step()
    print("numba" in sys.modules)
"""
    )
    assert printed.split() == ["False", "False", "False", "True"]


ONE_STEP_OF_ARRAYS = """
import os, sys, warnings
import numpy as np
from rowstep.arrays import Adam
param = np.zeros((3, 2), np.float32)
optimizer = Adam(lr=0.5)
def step():
    optimizer.step("param", param, np.ones((3, 2), np.float32))
    optimizer.end_iteration()
"""
SOURCES = {"torch": ONE_STEP + "step = optimizer.step", "arrays": ONE_STEP_OF_ARRAYS}

# Why Numba cannot be used, what makes it so, and the word that a warning or an error has for it.
REASONS = {"missing": ("sys.modules['numba'] = None", "numba"), "off": ("", "NUMBA_DISABLE_JIT")}
CASES = [("torch", "off"), ("arrays", "missing")]


@pytest.mark.parametrize(("source", "reason"), CASES)
def test_where_numba_cannot_be_used_the_reference_runs_and_one_warning_says_so(
    source: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the environment asks for Numba: then the step raises."""
    monkeypatch.setenv("ROWSTEP_BACKEND", "numba")
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1" if reason == "off" else "0")
    act, word = REASONS[reason]
    error, count, message, weight = python(f"""{SOURCES[source]}
{act}
try:
    step()
except (ImportError, RuntimeError) as error:
    print(error, float(abs(param).sum()))
del os.environ["ROWSTEP_BACKEND"]
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    step()
    step()
print(len(caught), caught[0].message, float(param[1, 0]), sep="\\n")
""").splitlines()
    assert word in error
    assert error.endswith(" 0.0")
    assert count == "1"
    assert "reference" in message
    assert word in message
    assert float(weight) < -0.9


@pytest.mark.parametrize("name", ["Numba", "cuda", " "])
def test_an_unknown_backend_is_refused_and_nothing_changes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROWSTEP_BACKEND", name)
    param = table(3, 2)
    optimizer = SparseAdam([param])
    before = Snapshot(optimizer)
    with pytest.raises(ValueError, match=rf"ROWSTEP_BACKEND is '{name}'; expected 'numba' or 'reference'"):
        step_with(optimizer, param, rows_of(param, [1]))
    before.assert_unchanged()


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
    monkeypatch.setattr(OverThreads, "_call", lambda self, parts, *arguments: parallel_runs.append(parts))
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

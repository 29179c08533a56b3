"""`rowstep warm-up`: after it, the first steps of usual programs compile nothing; where it cannot help, it says so."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from numba import types

from rowstep._kernels import cache
from rowstep.cli import _warm_up, main

WARM_UP = """
import sys
from rowstep.cli import main
from rowstep._kernels import cache
code = main(["warm-up"])
print(*(record.path for record in cache.records), sep="\\n", file=sys.stderr)
sys.exit(code)
"""

USUAL_PROGRAMS = """
import rowstep, torch
from numba.core import event
from torch import nn
compiled = []

class Listener(event.Listener):
    def on_start(self, started):
        compiled.append(started.data["dispatcher"].__qualname__)
    def on_end(self, ended): pass

def train(optimizer_class, ids_dtype, batch):
    table = nn.Embedding(5000, 32, sparse=True, padding_idx=0)
    bag = nn.EmbeddingBag(5000, 32, sparse=True, mode="mean")
    model = nn.ModuleList([table, bag, head := nn.Linear(32, 1)])
    optimizer = optimizer_class(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in range(3):
        ids = torch.randint(5000, (batch, 4), dtype=ids_dtype)
        optimizer.zero_grad()
        head(table(ids).sum(1) + bag(ids)).square().mean().backward()
        rowstep.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
        schedule.step()
    table.weight.grad = table.weight.grad.coalesce()
    optimizer.step()
    model.state_dict(), optimizer.state_dict()

with event.install_listener("numba:compile", Listener()):
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for optimizer_class in (rowstep.SparseAdam, rowstep.DeferredAdam, rowstep.DeferredAdamW):
            for batch in (8, 2000):
                train(optimizer_class, torch.int64, batch)
            train(optimizer_class, torch.int32, 2000)

from rowstep._kernels import cache
print(len(cache.records), compiled)
"""


def python(source: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", source]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | environment)
    assert done.returncode == 0, done.stderr
    return done


def test_after_it_the_first_steps_of_usual_programs_compile_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ROWSTEP_BACKEND", raising=False)
    # In the cache of the tests, where most of it may have been compiled before: alone that takes a quarter of a minute.
    done = python(WARM_UP)
    paths = [Path(line) for line in done.stderr.splitlines()]
    assert paths[0].is_file()
    for part in ("float32", f"{len(set(paths))} kernels", str(paths[0].parent)):
        assert part in done.stdout
    # A cache with what it names and nothing else.
    folder = tmp_path / paths[0].parent.name
    folder.mkdir()
    for path in paths:
        shutil.copy(path, folder)
    done = python(USUAL_PROGRAMS, NUMBA_CACHE_DIR=str(tmp_path))
    assert done.stdout == f"{len(set(paths))} []\n"  # and all that it has compiled is needed
    assert {path.name for path in folder.iterdir()} == {path.name for path in paths}


@pytest.fixture
def small_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of the trainings a kernel that compiles in no time."""

    def on_pool(x: Any) -> Any:
        return x + 1

    def train(name: str, dtype: object) -> None:
        assert cache.kernel(types.int64)(on_pool).call(1) == 2

    monkeypatch.setattr(_warm_up, "train", train)
    monkeypatch.setattr(cache, "records", [])
    monkeypatch.setattr(cache, "_has_warned", False)
    monkeypatch.delenv("ROWSTEP_BACKEND", raising=False)


@pytest.mark.usefixtures("small_kernel")
def test_each_optimizer_and_dtype_is_trained_and_what_cannot_be_saved_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cache, "directories", lambda: [tmp_path / "kernels"])
    assert main(["warm-up", "--dtype", "float64", "--dtype", "bfloat16", "float64"]) == 0
    _, *lines, kernels, done = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [
        [name, dtype] for dtype in ("float64", "bfloat16") for name in ("SparseAdam", "DeferredAdam", "DeferredAdamW")
    ]
    assert re.fullmatch(rf"1 kernels, .* in {tmp_path / 'kernels'}", kernels)
    assert done.startswith("Done in ")
    (tmp_path / "file").touch()
    monkeypatch.setattr(cache, "directories", lambda: [tmp_path / "file" / "kernels"])
    assert main(["warm-up"]) == 1
    shown = capsys.readouterr().err
    for part in ("cannot be saved", str(tmp_path / "file"), "NUMBA_CACHE_DIR"):
        assert part in shown


def test_where_nothing_can_be_compiled_or_kept_it_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import numba

    def refusal() -> str:
        assert main(["warm-up"]) == 1
        return capsys.readouterr().err

    for backend in ("reference", "cuda"):
        monkeypatch.setenv("ROWSTEP_BACKEND", backend)
        assert f"ROWSTEP_BACKEND is '{backend}'" in refusal()
    monkeypatch.delenv("ROWSTEP_BACKEND")
    monkeypatch.setattr(_warm_up, "train", lambda name, dtype: None)
    assert "did not ask for kernels on disk" in refusal()
    monkeypatch.setattr(numba.config, "DISABLE_JIT", True)
    assert "NUMBA_DISABLE_JIT" in refusal()
    monkeypatch.setitem(sys.modules, "numba", None)
    assert "Numba cannot be imported" in refusal()

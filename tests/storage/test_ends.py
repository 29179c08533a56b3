"""What a process leaves in files when it ends: the weights as they are, or word of what is missing."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from multiprocessing import util
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from rowstep import DeferredAdam, DeferredAdamW, storage
from tests.storage.others import Others

OPTIMIZERS: dict[str, Any] = {
    "DeferredAdam": lambda params: DeferredAdam(params, lr=0.1),
    "DeferredAdamW": lambda params: DeferredAdamW(params, lr=0.1),
    "by row": lambda params: DeferredAdam(params, lr=0.1, second_moment="row"),
}


class Run:
    """A table, in a file or in memory, whose row 1 waits after the first step, and row 9 from the start."""

    def __init__(self, path: Path | str | None, kind: str = "DeferredAdam", dtype: torch.dtype = torch.float32) -> None:
        if path is None:
            weight = torch.ones(10, 2, dtype=dtype)
        else:
            weight = storage.create(path, 10, 2, dtype, init=nn.init.ones_)
        self.table = nn.Embedding(10, 2, sparse=True, _weight=weight)
        self.optimizer = OPTIMIZERS[kind](self.table.parameters())

    def train(self, first: int = 0, last: int = 4) -> Run:
        for step in range(first, last):
            self.optimizer.zero_grad()
            self.table(torch.tensor([2 if step else 1])).sum().backward()
            self.optimizer.step()
        return self


def expected(kind: str = "DeferredAdam", dtype: torch.dtype = torch.float32) -> Tensor:
    return Run(None, kind, dtype).train().table.weight.detach()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    gc.collect()  # the tables of other tests
    return tmp_path / "a.safetensors"


@pytest.mark.parametrize(
    ("kind", "dtype"), [*((kind, torch.float32) for kind in OPTIMIZERS), ("DeferredAdam", torch.bfloat16)]
)
def test_what_is_synced_has_the_moves_of_rows_that_wait(
    tmp_path: Path, path: Path, kind: str, dtype: torch.dtype, backend: str
) -> None:
    run = Run(path, kind, dtype).train(0, 2)
    storage.sync()
    assert torch.equal(load_file(path)["weight"][9], run.table.weight[9].detach())
    run.train(2, 4)
    storage.snapshot(tmp_path / "snap")
    copied = load_file(tmp_path / "snap" / path.name)["weight"]
    assert torch.equal(copied, run.table.weight.detach())
    assert torch.allclose(copied, expected(kind, dtype), rtol=4 * torch.finfo(dtype).eps)
    assert storage.status(tmp_path / "snap" / path.name).clean
    assert storage.status(path).clean


def test_a_table_that_was_written_behind_our_back_is_not_synced(tmp_path: Path, path: Path) -> None:
    run = Run(path).train()
    alias = run.table.weight.detach()
    storage.sync()
    run.train(4, 5)
    alias[3] = 7
    with pytest.raises(RuntimeError, match="was written to through another tensor that shares its memory"):
        storage.snapshot(tmp_path / "snap")
    assert not storage.status(path).clean
    assert not (tmp_path / "snap").exists()
    run.optimizer.flush()
    storage.sync()
    assert storage.status(path).clean


TRAIN = "from tests.storage.test_ends import *\nrun = Run(sys.argv[1]).train()\n"
ENDS = {
    "sys.exit": "sys.exit(0)",
    "a thread that has the lock for a moment": """
import threading, time
def hold():
    with run.optimizer._lock:
        held.set()
        time.sleep(0.3)
held = threading.Event()
threading.Thread(target=hold, daemon=True).start()
held.wait()
""",
    "multiprocessing": "",
}


@pytest.mark.parametrize("end", ENDS)
def test_a_process_that_ends_writes_what_waits(end: str, path: Path, others: Others) -> None:
    program = TRAIN + ENDS[end]
    if end == "multiprocessing":
        program = (
            f"import multiprocessing\ndef train():\n    exec({program!r}, globals())\n"
            "child = multiprocessing.get_context('fork').Process(target=train)\nchild.start()\nchild.join()"
        )
    assert others.run(program, path) == ""
    assert torch.allclose(load_file(path)["weight"], expected())
    assert storage.status(path).reason == "it was written after its last sync, so the last step may be there in part"


def test_an_unhandled_exception_writes_what_waits(path: Path) -> None:
    program = f"import sys\nsys.argv = ['', {str(path)!r}]\n{TRAIN}1 / 0"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "ZeroDivisionError" in ended.stderr
    assert ended.stderr.count("Traceback") == 1
    assert torch.allclose(load_file(path)["weight"], expected())


def test_a_process_that_is_killed_leaves_word_of_what_is_missing(path: Path, others: Others) -> None:
    lacking = "rows may lack moves that a deferred optimizer had put off"
    assert others.run(TRAIN + "storage.sync()\nrun.train(4, 6)\nos.kill(os.getpid(), 9)", path) == "9"
    assert lacking in storage.status(path).reason
    with pytest.warns(UserWarning, match=lacking):
        weight = storage.open(path, "weight", writable=True)
    weight[0] = 1
    del weight  # who opened it has not made up for the moves
    assert lacking in storage.status(path).reason
    with pytest.warns(UserWarning, match=lacking):
        weight = storage.open(path, "weight", writable=True)
    storage.sync(weight)
    assert storage.status(path).clean
    weight[0] = 2
    assert lacking not in storage.status(path).reason


def test_a_dropped_optimizer_leaves_nothing_missing(path: Path) -> None:
    run = Run(path).train()
    assert "lack" in storage.status(path).reason
    del run
    gc.collect()
    assert torch.allclose(load_file(path)["weight"], expected())
    assert "lack" not in storage.status(path).reason


def test_a_forked_process_leaves_rows_that_wait_to_its_parent(path: Path) -> None:
    run = Run(path).train()
    before, reason = load_file(path)["weight"], storage.status(path).reason
    child = os.fork()
    if not child:
        try:
            storage.sync()
            util._exit_function()  # type: ignore[attr-defined]
            os._exit(0 if torch.equal(load_file(path)["weight"], before) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert storage.status(path).reason == reason
    storage.sync()
    assert torch.allclose(load_file(path)["weight"], expected())
    assert run.table.weight is not None


def test_a_thread_that_never_lets_go_does_not_keep_a_process_from_ending(path: Path, others: Others) -> None:
    program = f"""
{TRAIN}
import threading
from rowstep.storage import _mapping
_mapping._PATIENCE_SECONDS = 0.1
def hold():
    run.optimizer._lock.__enter__()
    held.set()
    threading.Event().wait()
held = threading.Event()
threading.Thread(target=hold, daemon=True).start()
held.wait()
"""
    assert "another thread has been in a step" in others.run(program, path)
    assert "rows may lack moves" in storage.status(path).reason

"""Interrupts, handlers of signals and other processes that come in the middle of what is done with files."""

from __future__ import annotations

import copy
import fcntl
import itertools
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rowstep import HostEmbedding, SparseAdam, _fork, _state_files, storage
from tests.helpers.interrupts import Interrupter, lines_of
from tests.storage.test_ends import Run
from tests.storage.test_state_kept import param, step, steps_in


@pytest.mark.parametrize("number", [1, 2, 3])
def test_an_interrupt_right_after_a_file_is_made_leaves_none(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, made = param(), []
    optimizer = SparseAdam([("a", one)], state_dir=tmp_path)

    def create(*arguments: Any, make: Any = storage.create, **options: Any) -> Any:
        made.append(make(*arguments, **options))
        if len(made) == number:
            raise KeyboardInterrupt
        return made[-1]

    with monkeypatch.context() as patch:
        patch.setattr(storage, "create", create)
        with pytest.raises(KeyboardInterrupt):
            step(optimizer, one)
    assert list(tmp_path.iterdir()) == []
    step(optimizer, one)
    assert steps_in(tmp_path, "a") == 1


def test_a_file_that_another_process_is_making_is_not_deleted(tmp_path: Path) -> None:
    path = tmp_path / "a.step.safetensors"
    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError, match="another process has it open"):
            SparseAdam([("a", param())], state_dir=tmp_path)
    assert path.exists()


def test_a_handler_may_sync_at_any_line_of_a_sync(tmp_path: Path) -> None:
    weight = storage.create(tmp_path / "a.safetensors", 4, 2)
    action = lambda: storage.sync(weight)  # noqa: E731
    for line in lines_of(action, points=40, places=("/rowstep/storage/",)):
        Interrupter(line, action, places=("/rowstep/storage/",)).run(action)
        assert storage.status(tmp_path / "a.safetensors").clean
    assert len(list(tmp_path.iterdir())) == 2


def test_an_interrupt_while_files_are_synced_leaves_no_lock_held(tmp_path: Path) -> None:
    run = Run(tmp_path / "a.safetensors").train()
    taken: list[bool] = []

    def take() -> None:
        taken.append(run.optimizer._bare_lock.acquire(timeout=2))

    was_interrupted = True
    while was_interrupted:
        was_interrupted, at, returns = False, len(taken) + 1, itertools.count(1)

        def interrupt(frame: Any, event: str, _: Any, at: int = at, returns: Iterator[int] = returns) -> None:
            """As a signal's handler does, when a function in C returns."""
            if event == "c_return" and "_state_files" in frame.f_code.co_filename and next(returns) == at:
                sys.setprofile(None)
                raise KeyboardInterrupt

        sys.setprofile(interrupt)
        try:
            _state_files._write_all(-1)
        except KeyboardInterrupt:
            was_interrupted = True
        finally:
            sys.setprofile(None)
        thread = threading.Thread(target=take)
        thread.start()
        thread.join()
        assert taken[-1]
        run.optimizer._bare_lock = run.optimizer._lock = threading.RLock()  # that one is the thread's
    assert len(taken) > 5


def test_an_optimizer_that_could_not_be_made_keeps_no_file_from_its_sync(tmp_path: Path) -> None:
    weight = storage.create(tmp_path / "a.safetensors", 4, 2)
    with pytest.raises(TypeError) as kept:
        SparseAdam(torch.zeros(3))
    assert kept.tb.tb_next is not None  # in which the optimizer still is
    storage.sync(weight)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_takes_no_files_and_leaves_the_others_theirs(copied: Any, tmp_path: Path) -> None:
    one = param()
    optimizer = SparseAdam([("a", one)], state_dir=tmp_path)
    step(optimizer, one)
    other = copied(optimizer)
    other.add_param_group({"params": [("b", param())]})
    assert [group["state_dir"] for group in other.param_groups] == [None, None]
    assert [group["state_dir"] for group in optimizer.param_groups] == [str(tmp_path)]
    assert other in _fork.optimizers()


def test_others_may_make_files_tables_and_optimizers_while_files_are_synced(tmp_path: Path) -> None:
    weight = storage.create(tmp_path / "a.safetensors", 4, 2)
    made: list[Any] = []

    def make() -> None:
        table = HostEmbedding(4, 2, device="cpu", path=tmp_path / f"{len(made)}.safetensors")
        table(torch.tensor([1]))
        made.append((table, SparseAdam(table.parameters())))

    make()
    places = ("/weakref.py", "/_weakrefset.py", "/torch/utils/weak.py", "/rowstep/storage/_mapping.py")
    action = lambda: storage.sync(weight)  # noqa: E731
    for line in lines_of(action, 40, places):
        Interrupter(line, make, places).run(action)
    assert len(made) > 10

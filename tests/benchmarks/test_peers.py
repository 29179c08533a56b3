"""The suite `peers` runs its workers, refuses results that differ, and reports who is missing. No time is asserted."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from benchmarks.cases import Case
from benchmarks.command import main
from benchmarks.contenders import DisagreementError
from benchmarks.peers import catalogue, environments, measures
from benchmarks.peers.agreement import Agreement, first_move
from benchmarks.peers.catalogue import CONTESTANTS, LOOPS, ROWSTEP, ROWSTEP_LOOP, SPARSE_ADAM, STEPS, Peer, Rule
from benchmarks.peers.environments import Environment, MissingError
from benchmarks.peers.groups import groups
from benchmarks.peers.process import Process
from benchmarks.peers.sizes import Bags
from benchmarks.peers.worker import Worker
from tests.helpers.pictures import is_png

STEP = Case("step", 300, 8, 64, zipf=True, tables=2)
LOOP = Bags("loop", 300, 8, 16, 4, zipf=True, tables=2)
HERE = [peer for peer in (*STEPS, *LOOPS) if peer.environment is None]


class InThisProcess:
    """A worker without a process of its own."""

    def __init__(self, peer: Peer, folder: Path) -> None:
        self.peer, self.folder = peer, folder
        module, _, name = peer.kind.rpartition(".")
        self.worker = Worker(f"{CONTESTANTS}.{module}", name, 1)
        self.worker.open(str(folder))

    def turn(self, steps: int, warm_up: float = 0.0) -> list[float]:
        return list(self.worker.turn(steps, warm_up)["seconds"])

    def state(self, table: int, rows: NDArray[np.int64]) -> dict[str, NDArray[np.float32]]:
        np.save(self.folder / "rows.npy", rows)
        self.worker.state(table, str(self.folder / "rows.npy"), str(self.folder / "state.npz"))
        with np.load(self.folder / "state.npz") as arrays:
            return dict(arrays)


@pytest.fixture(autouse=True)
def reference(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Workers would compile, or load, the kernels one by one; what they compute is for other tests."""
    monkeypatch.setenv("ROWSTEP_BACKEND", "reference")
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def checked(peer: Peer, case: Case | Bags, folder: Path, **changes: Any) -> None:
    """rowstep, then the peer, as a run checks them; `changes` are made to what the peer answers."""
    data = measures.data_of(case, 1)
    data.write(folder)
    agreement = Agreement(data)
    first = ROWSTEP if isinstance(case, Case) else ROWSTEP_LOOP
    agreement.check(cast(Process, InThisProcess(first, folder)))
    if peer.rule is Rule.FACTORED:
        agreement.check(cast(Process, InThisProcess(catalogue.FACTORED, folder)))
    worker = InThisProcess(peer, folder)
    answered = worker.state

    def state(table: int, rows: NDArray[np.int64]) -> dict[str, NDArray[np.float32]]:
        found = answered(table, rows)
        return found | {name: change(found[name]) for name, change in changes.items()}

    worker.state = state  # type: ignore[method-assign]
    agreement.check(cast(Process, worker))


@pytest.mark.parametrize("peer", HERE, ids=lambda peer: peer.name)
def test_contestants_of_our_own_environment_agree(peer: Peer, tmp_path: Path) -> None:
    checked(peer, STEP if peer in STEPS else LOOP, tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": lambda found: found + np.float32(1e-5)}, "weights after one step differ by up to 1"),
        ({"weights": lambda found: found * np.nan}, "weights after one step differ"),
        ({"first": lambda found: found * np.float32(1.001)}, "first moments after 3 steps differ"),
        ({"second": lambda found: found * np.float32(1.001)}, "second moments after 3 steps differ"),
    ],
)
def test_results_that_differ_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(DisagreementError, match=message):
        checked(SPARSE_ADAM, STEP, tmp_path, **changes)


def test_a_rule_that_moves_other_rows_is_refused(tmp_path: Path) -> None:
    """By momentum, say, or by weight decay."""
    seen = 0

    def decay(found: NDArray[np.float32]) -> NDArray[np.float32]:
        nonlocal seen
        seen += 1  # the second answer is about rows without a gradient
        return found * np.float32(0.999) if seen == 2 else found

    with pytest.raises(DisagreementError, match="rows without a gradient"):
        checked(SPARSE_ADAM, STEP, tmp_path, weights=decay)


def test_the_first_move_is_that_of_the_optimizers() -> None:
    gradient = torch.randn(50, 8, generator=torch.Generator().manual_seed(0)) + 0.1
    for rule, make in ((Rule.DENSE, torch.optim.Adam), (Rule.ADAGRAD, torch.optim.Adagrad)):
        param = torch.nn.Parameter(torch.zeros(50, 8))
        param.grad = gradient
        make([param], lr=1e-3).step()
        expected = first_move(Peer("", "", rule, 0), gradient.numpy())
        torch.testing.assert_close(param.detach(), torch.from_numpy(expected), rtol=1e-4, atol=1e-8)
    row = np.array([[3.0, -4.0, 0.0, 0.0]], np.float32)  # the mean square is 25 / 4
    for rule in (Rule.ROW, Rule.ROW_ADAGRAD):
        np.testing.assert_allclose(first_move(Peer("", "", rule, 0), row), [[-1.2e-3, 1.6e-3, 0, 0]], rtol=1e-6)


def test_a_quick_run_reports_who_took_part_and_who_could_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = Peer("no such package", "torch_steps.NoSuchClass", Rule.LAZY, 12)
    monkeypatch.setattr(catalogue, "STEPS", (ROWSTEP, SPARSE_ADAM, broken))
    parts = ["zipf-20k", "by-rows", "by-duplicates", "by-threads"]
    assert main(["peers", "--quick", "--threads", "1", "--out", str(tmp_path), "--only", *parts]) == 0
    assert "no such package was left out" in capsys.readouterr().out

    document = json.loads((tmp_path / "peers.json").read_text())
    kinds = [measured["kind"] for measured in document["measurements"]]
    assert kinds == ["step", "rows", "rows", "duplicates", "duplicates", "threads"]
    step, *curves = document["measurements"]
    assert set(step["seconds"]) == {ROWSTEP.name, SPARSE_ADAM.name}
    assert "NoSuchClass" in step["left_out"][broken.name]
    for curve in curves:
        assert set(curve["seconds"]) == {"rowstep", "torch SparseAdam", "roofline"}
    assert document["versions"][ROWSTEP.name]["torch"] == torch.__version__
    assert is_png(tmp_path / "peers.png")
    page = (tmp_path / "peers.md").read_text()
    assert "| torch SparseAdam | same |" in page
    assert "## by-duplicates" in page


@pytest.fixture
def process() -> Iterator[Process]:
    started = Process(SPARSE_ADAM, 1)
    yield started
    started.end()


def test_a_worker_that_fails_or_dies_gives_the_reason(process: Process) -> None:
    with pytest.raises(MissingError, match=r"FileNotFoundError: .*ids\.npy"):
        process.ask("open", folder="/nowhere")
    assert process.ask("close") == {}  # it is still there
    os.kill(process.number, signal.SIGKILL)
    with pytest.raises(MissingError, match="was ended by SIGKILL"):
        process.ask("close")


def test_a_package_that_cannot_be_installed_gives_the_reason() -> None:
    with pytest.raises(MissingError, match=r"needs a Python from 3\.98 to 3\.99"):
        Environment("jax", (), (3, 99), (3, 98))._base()
    failing = [sys.executable, "-c", "import sys; sys.exit('a warning\\nERROR: no wheel for this machine')"]
    with pytest.raises(MissingError, match="could not be installed: ERROR: no wheel for this machine"):
        environments._run(failing)


def test_every_environment_has_its_pinned_requirements() -> None:
    for peer in (*STEPS, *LOOPS):
        if peer.environment:
            lines = (environments.REQUIREMENTS / f"{peer.environment.name}.txt").read_text().splitlines()
            pinned = {line.split("==")[0].lower() for line in lines if not line.startswith("#")}
            assert all("==" in line for line in lines if not line.startswith("#"))
            assert {package.lower() for package in peer.packages} <= pinned


def test_groups_fit_into_memory_and_begin_with_the_first() -> None:
    first, *others = (Peer(name, "", Rule.LAZY, 10) for name in "abcd")
    assert groups(others, first, 100, free=4_000 / 0.75) == [[first, *others]]
    assert groups(others, first, 100, free=3_999 / 0.75) == [[first, *others[:2]], [first, others[2]]]
    assert groups(others, first, 100, free=1) == [[first, other] for other in others]

"""The suite `peers` runs its workers, refuses results that differ, and reports who is missing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from benchmarks.cases import Case
from benchmarks.command import main
from benchmarks.contenders import DisagreementError
from benchmarks.peers import catalogue, measures, report
from benchmarks.peers.agreement import Agreement
from benchmarks.peers.catalogue import FBGEMM_LOOP, LOOPS, ROWSTEP, ROWSTEP_LOOP, SPARSE_ADAM, STEPS, Peer, Rule
from benchmarks.peers.curves import LABELS
from benchmarks.peers.process import Process
from benchmarks.peers.suite import PeersSuite
from benchmarks.peers.worker import Worker
from benchmarks.timing import Measurement, Timing

STEP = Case("step", 300, 8, 64, zipf=True, tables=2)
LOOP = Case("loop", 300, 8, 64, zipf=True, tables=2, bag=4)
HERE = [peer for peer in (*STEPS, *LOOPS) if peer.environment is None]


class InThisProcess:
    """A worker without a process of its own; `change` is made to what it answers."""

    def __init__(self, peer: Peer, folder: Path, change: Callable[[Any], Any] = lambda found: found) -> None:
        self.peer, self.folder, self.change = peer, folder, change
        module, _, name = peer.kind.rpartition(".")
        self.worker = Worker(f"{catalogue.CONTESTANTS}.{module}", name, 1)
        self.worker.open(str(folder))

    def turn(self, steps: int, warm_up: float = 0.0) -> list[float]:
        return list(self.worker.turn(steps, warm_up)["seconds"])

    def state(self, table: int, rows: NDArray[np.int64]) -> Any:
        np.save(self.folder / "rows.npy", rows)
        self.worker.state(table, str(self.folder / "rows.npy"), str(self.folder / "state.npz"))
        with np.load(self.folder / "state.npz") as arrays:
            return self.change(dict(arrays))


@pytest.fixture(autouse=True)
def reference(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Workers would compile, or load, the kernels one by one; what they compute is for other tests."""
    monkeypatch.setenv("ROWSTEP_BACKEND", "reference")
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def check(peer: Peer, folder: Path, *change: Callable[[Any], Any]) -> None:
    """rowstep, then the peer, as a run checks them."""
    data = measures.data_of(STEP if peer in STEPS else LOOP, 1)
    data.write(folder)
    agreement = Agreement(data)
    agreement.check(cast(Process, InThisProcess(ROWSTEP if peer in STEPS else ROWSTEP_LOOP, folder)))
    agreement.check(cast(Process, InThisProcess(peer, folder, *change)))


@pytest.mark.parametrize("peer", HERE, ids=lambda peer: peer.name)
def test_contestants_of_our_own_environment_agree(peer: Peer, tmp_path: Path) -> None:
    check(peer, tmp_path)


@pytest.mark.parametrize(
    ("slot", "factor", "answer", "message"),
    [
        ("weights", 1.001, 1, "weights after one step differ by up to"),
        ("weights", np.nan, 1, "weights after one step differ"),
        ("weights", 0.999, 2, "rows without a gradient"),  # moved by momentum, say, or by weight decay
        ("first", 1.001, 5, "first moments after 3 steps differ"),
        ("second", 1.001, 5, "second moments after 3 steps differ"),
    ],
)
def test_results_that_differ_are_refused(slot: str, factor: float, answer: int, message: str, tmp_path: Path) -> None:
    asked = 0

    def change(found: Any) -> Any:
        nonlocal asked
        asked += 1
        return found | {slot: found[slot] * np.float32(factor)} if asked == answer else found

    with pytest.raises(DisagreementError, match=message):
        check(SPARSE_ADAM, tmp_path, change)


def test_a_quick_run_reports_who_took_part_and_who_could_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = Peer("no such package", "torch_steps.NoSuchClass", Rule.LAZY, 12)
    monkeypatch.setattr(catalogue, "STEPS", (ROWSTEP, SPARSE_ADAM, broken))
    parts = ["zipf-20k", "by-duplicates", "by-threads"]
    assert main(["peers", "--quick", "--threads", "1", "--out", str(tmp_path), "--only", *parts]) == 0
    assert "no such package was left out" in capsys.readouterr().out
    document = json.loads((tmp_path / "peers.json").read_text())
    kinds = [measured["kind"] for measured in document["measurements"]]
    assert kinds == ["step", "duplicates", "duplicates", "threads"]
    step = document["measurements"][0]
    assert set(step["seconds"]) == {ROWSTEP.name, SPARSE_ADAM.name}
    assert "NoSuchClass" in step["left_out"][broken.name]
    assert document["versions"][ROWSTEP.name]["torch"] == torch.__version__


def measured(kind: str, threads: int, others: float, seconds: dict[str, Any], name: str = "zipf-1m") -> Measurement:
    """A string instead of seconds is the reason why somebody was left out."""
    timings = {who: Timing.of(given) for who, given in seconds.items() if isinstance(given, tuple)}
    left_out = {who: given for who, given in seconds.items() if isinstance(given, str)}
    return Measurement(kind, name, "a case", threads, timings, left_out, others)


DENSE = "torch Adam(fused)"
MEASURED = [
    measured("step", 1, 0.0, {ROWSTEP.name: (0.001, 0.002, 0.009), SPARSE_ADAM.name: (0.004, 0.01, 0.02)}),
    measured("step", 1, 0.0, {ROWSTEP.name: (0.01,), DENSE: (0.0501,)}),
    measured("step", 2, 0.0, {ROWSTEP.name: (0.001,), SPARSE_ADAM.name: "no wheel"}),
    measured("loop", 1, 0.5, {ROWSTEP_LOOP.name: (0.001,), FBGEMM_LOOP.name: (0.0016,)}),
    *(
        measured(axis, 1, 0.0, {"rowstep": (0.001,), "torch SparseAdam": (0.004,), "roofline": (0.0005,)}, "10")
        for axis in LABELS
    ),
]


def test_ratios_are_to_the_first_of_the_same_group_and_who_was_left_out_is_named() -> None:
    grid = report.grids(MEASURED)["step-ratios"]
    assert grid.headings == ["", "rule", "a case"]
    assert grid.lines[0] == [SPARSE_ADAM.name, "same", "5.0x, left out"]  # of medians, on 1 and 2 threads
    assert [DENSE, "Adam on all rows", "5.0x"] in grid.lines
    assert list(report.left_out("step", MEASURED)) == [
        f"{SPARSE_ADAM.name} was left out of a case on 2 threads: no wheel."
    ]


def test_bars_are_by_the_medians_and_name_the_best_peer() -> None:
    suite = PeersSuite(quick=False, threads=[1], repeats=1)
    for one in MEASURED[:4]:
        suite.expect(one)
    found = [(bar.limit, round(bar.reached, 3), bar.met) for bar in suite.bars]
    assert found == [(1, 5.0, True), (2, 5.0, True), (1.5, 1.6, True)]


def test_what_a_page_says_of_a_run() -> None:
    document = {
        "command": "python -m benchmarks peers",
        "date": "2026-11-18",
        "machine": dict.fromkeys(("cpu", "cores", "system", "python", "rowstep", "torch", "numba", "numpy"), "?")
        | {"cpu_flags": "sse2 avx2"},
        "measurements": [one.as_json() for one in MEASURED],
        "versions": {ROWSTEP.name: {"python": "3.11.7"}},
        "missing": {"MXNet, lazy": "needs a Python from 3.10 to 3.11"},
    }
    blocks = report.blocks(document)
    assert "| torch SparseAdam | same | 5.0x, left out |" in blocks["step-ratios"]
    assert "1.60 (1.60) *" in blocks["loop-times"]
    assert "missing: needs a Python from 3.10 to 3.11" in blocks["contestants"]
    assert "| 10 | 1 | 1.00 | 4.00 | 0.500 | 4.0x | 2.0x |" in blocks["by-rows"]
    sentences = "\n".join(report.sentences(document, MEASURED))
    assert "Measured on 2026-11-18 by `python -m benchmarks peers` on ? cores of ? (without AVX-512)" in sentences
    assert "during 1 of the measurements" in sentences

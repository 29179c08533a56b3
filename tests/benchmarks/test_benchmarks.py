"""The benchmarks run, write what they say, and time nothing before its results agree. Nothing here asserts a time."""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from benchmarks import contenders, deferred, gpu, host, memory, sparse
from benchmarks.cases import ZIPF
from benchmarks.command import main
from benchmarks.distributed import training
from benchmarks.sparse import fresh
from benchmarks.timing import Measurement, Timing
from tests.helpers.pictures import is_png
from tests.helpers.ranks import Ranks


def run(folder: Path, *line: str) -> Any:
    """What a run has written."""
    assert main([*line, "--out", str(folder)]) == 0
    (written,) = folder.glob("*.json")
    return json.loads(written.read_text())


def contenders_of(document: Any) -> dict[tuple[str, str], set[str]]:
    return {(part["kind"], part["name"]): set(part["seconds"]) for part in document["measurements"]}


def test_quick_bench_writes_all_measurements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def here(function: Callable[..., object], *arguments: object, **environment: str) -> object:
        """In this interpreter: a fresh one imports torch for seconds."""
        asked.append((function, environment))
        return function(*arguments)

    monkeypatch.setattr(fresh, "in_fresh_interpreter", here)
    monkeypatch.setenv("ROWSTEP_BACKEND", "reference")  # the kernels run in the next test
    document = run(tmp_path, "--quick", "--repeats", "2", "--threads", "1")
    assert "One step" in capsys.readouterr().out
    assert document["command"].startswith("python -m benchmarks --quick")
    assert document["machine"].keys() >= {"cpu", "cpu_flags", "cores", "torch", "numba", "numpy", "rowstep"}
    assert {measured["kind"] for measured in document["measurements"]} == {"step", "dense"}
    for measured in document["measurements"]:
        for timing in measured["seconds"].values():
            assert 0 < timing["min"] <= timing["median"]
    steps = {contenders.ROWSTEP, contenders.TORCH, contenders.ROOFLINE}
    assert contenders_of(document)["step", "uniform-20k"] == steps
    assert document["first_step_seconds"].keys() == {"cold", "cached", "others"}
    cold, cached, *of_memory = asked
    assert cold == cached == (fresh.seconds_of_first_step, {"NUMBA_CACHE_DIR": cold[1]["NUMBA_CACHE_DIR"]})
    if sys.platform.startswith("linux"):
        assert of_memory == [(fresh.peaks, {})]
        (peak,) = document["peak_memory_bytes_per_id"]
        assert peak.keys() == {"rows", "rowstep", "torch"}
    assert document["bars"] == []


def test_bars_are_listed_for_each_number_of_threads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = torch.get_num_threads()
    document = run(tmp_path, "--only", "uniform-100k", "--repeats", "2", "--threads", "1", "2")
    assert torch.get_num_threads() == before
    assert [measured["threads"] for measured in document["measurements"]] == [1, 2]
    for bar in document["bars"]:
        assert bar.keys() == {"measure", "limit", "reached", "unit", "at_least", "disturbed", "met"}
    assert len(document["bars"]) == 2
    assert "at least 6x" in capsys.readouterr().out


def test_a_fresh_interpreter_answers_with_what_it_measured() -> None:
    assert fresh.in_fresh_interpreter(fresh.seconds_of_first_step, ROWSTEP_BACKEND="reference") > 0


def test_bench_refuses_to_time_results_that_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def off_by_a_little(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SparseAdam(parameters, lr=1.001e-3)

    monkeypatch.setattr(sparse, "SparseAdam", off_by_a_little)
    assert main(["--quick", "--only", "uniform-20k", "--out", str(tmp_path)]) == 1
    assert "weights differ from torch's" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_quick_deferred_bench_writes_all_measurements(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = run(tmp_path, "deferred", "--quick", "--repeats", "2", "--threads", "1")
    shown = capsys.readouterr().out
    for part in ("catch-up before it, when", "Flush of all", "as long as torch Adam", "held-out"):
        assert part in shown
    assert is_png(tmp_path / "deferred.png")
    beside_dense = {deferred.DEFERRED, deferred.MADE_DENSE, contenders.ADAM}
    assert contenders_of(document) == {
        ("step", "zipf-20k"): {deferred.DEFERRED, deferred.SPARSE, contenders.TORCH},
        ("step", "uniform-50k"): beside_dense,
        ("flush", "zipf-20k"): {deferred.DEFERRED, contenders.ADAM},
        ("share", "5%-of-10k"): beside_dense,
        ("share", "30%-of-10k"): beside_dense,
    }
    losses = document["curves"]["losses"]
    assert losses["DeferredAdam"] == pytest.approx(losses["dense Adam"], rel=1e-4)
    assert losses["SparseAdam"] != pytest.approx(losses["dense Adam"], rel=1e-2)


def test_break_even_lies_between_the_shares_measured() -> None:
    def measured(milliseconds: float) -> Measurement:
        taken = {deferred.DEFERRED: milliseconds, contenders.ADAM: 10, deferred.MADE_DENSE: 100}
        return Measurement("share", "", "", 1, {name: Timing((time,)) for name, time in taken.items()})

    found = deferred.break_evens([(0.1, measured(5)), (0.2, measured(20))])
    assert [(one["opponent"], one["share"]) for one in found] == [
        (contenders.ADAM, pytest.approx(0.15)),
        (deferred.MADE_DENSE, None),
    ]


def test_quick_distributed_bench_writes_all_measurements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ROWSTEP_BACKEND", "reference")
    before = set(multiprocessing.active_children())
    document = run(tmp_path, "distributed", "--quick", "--repeats", "2")
    shown = capsys.readouterr().out
    for part in ("the busiest of 8", "Messages of a step", "One training step", "Where the step of a sharded table"):
        assert part in shown
    assert set(multiprocessing.active_children()) == before
    names = ("zipf-20k-1", "zipf-20k-2", "3-tables-2")
    assert contenders_of(document) == {("step", name): set(training.WAYS) for name in names}
    assert [(found["tables"], found["collectives"]) for found in document["messages"]] == [(1, 6), (5, 6)]
    for found in document["messages"]:
        assert found["sent"] == pytest.approx(found["formula"], rel=0.1)  # few ids: chance decides who owns them
    for found in document["stages_ms"]:
        timed = {stage for stage, time in found["stages"].items() if time > 0}
        assert timed == set(training.STAGES if "2 ranks" in found["about"] else training.PHASES)


def test_distributed_bench_refuses_to_time_results_that_differ() -> None:
    class Answers:
        def run(self, *_: Any) -> list[Any]:
            return [training.OnRank({training.SHARDED: (difference, 0.0)}, {}, {}, 0.0) for difference in (0.0, 1.0)]

    with pytest.raises(contenders.DisagreementError, match="differ from those of 'torch DDP"):
        training.steps(cast(Ranks, Answers()), 2, ZIPF, 1)


def test_the_bytes_of_every_kind_of_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROWSTEP_BACKEND", "reference")
    monkeypatch.setattr(memory, "check_agreement", lambda: None)  # it compiles the kernels of every kind
    document = run(tmp_path, "memory", "--quick", "--only", "uniform-20k", "--repeats", "1")
    assert {name: round(size, 2) for name, size in document["state_bytes_per_weight"].items()} == {
        "float32": 8.0, "bfloat16": 4.0, "row": 4.06, "bfloat16 and row": 2.06, "row, no first": 0.06,
    }  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_suite_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpu", "--out", str(tmp_path)]) == 0
    assert "no GPU" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_the_suite_for_gpus_checks_and_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, which stands for a device here."""
    monkeypatch.setattr(gpu, "DEVICE", "cpu")
    monkeypatch.setenv("ROWSTEP_BACKEND", "reference")
    document = run(tmp_path, "gpu", "--quick", "--repeats", "1")
    names = {contenders.ROWSTEP, gpu.REFERENCE, contenders.TORCH, contenders.ADAM}
    assert contenders_of(document) == {("step", case.name): names for case in gpu.QUICK}
    assert document["device"] == "cpu"


def test_quick_host_bench_writes_all_measurements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROWSTEP_BACKEND", "reference")
    monkeypatch.setattr(host, "in_fresh_interpreter", lambda function, *arguments, group=None: function(*arguments))
    document = run(tmp_path, "host", "--quick", "--repeats", "2", "--threads", "1")
    kinds = [(kind, name) for name in ("fits-uniform", "fits-zipf") for kind in ("step", "loop")]
    assert contenders_of(document) == {each: {host.RAM, host.FILE} for each in kinds}
    assert document["beyond_memory"][host.FILE].keys() == {"seconds", "faults", "read", "bytes"}
    assert document["sparse_file"].keys() == {"seconds", "resident"}

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

from benchmarks import contenders, deferred, figures, gpu, host, memory, rows, sparse
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
    assert document["threads"] == [1]
    assert document["date"].count("-") == 2
    assert document["machine"].keys() >= {"cpu", "cpu_flags", "cores", "torch", "numba", "numpy", "rowstep"}
    assert {measured["kind"] for measured in document["measurements"]} == {"step", "loop", "dense"}
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
    assert [measured["threads"] for measured in document["measurements"]] == [1, 1, 2, 2]
    assert [measured["kind"] for measured in document["measurements"]] == ["step", "loop"] * 2
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
    for part in ("catch-up before it, when", "Flush of all", "Whole loop"):
        assert part in shown
    beside_dense = {deferred.DEFERRED, contenders.ADAM}
    beside_sparse = {deferred.DEFERRED, deferred.SPARSE, contenders.TORCH}
    found = {(kind, "uniform-50k"): beside_dense for kind in ("step", "loop")}
    found |= {(kind, "zipf-20k"): beside_sparse for kind in ("step", "loop")}
    assert contenders_of(document) == found | {("flush", "zipf-20k"): beside_dense}


def test_quick_distributed_bench_writes_all_measurements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ROWSTEP_BACKEND", "reference")
    before = set(multiprocessing.active_children())
    document = run(tmp_path, "distributed", "--quick", "--repeats", "2")
    shown = capsys.readouterr().out
    for part in ("Whole loop", "Where the step of a sharded table"):
        assert part in shown
    assert set(multiprocessing.active_children()) == before
    names = ("zipf-20k-1", "zipf-20k-2", "3-tables-2")
    assert contenders_of(document) == {(kind, name): set(training.WAYS) for kind in ("step", "loop") for name in names}
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


def test_quick_rows_bench_compares_four_optimizers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROWSTEP_BACKEND", "reference")
    document = run(tmp_path, "rows", "--quick", "--repeats", "1", "--threads", "1")
    by_rows = {(kind, case.name): set(rows.NAMES) for kind in ("step", "loop") for case in rows.QUICK}
    by_share = {
        (f"{kind} of a share", case.name): {deferred.DEFERRED, contenders.ADAM}
        for kind in ("step", "loop")
        for shares in rows.QUICK_SHARES
        for case in shares
    }
    assert contenders_of(document) == by_rows | by_share


def test_a_measurement_is_the_same_in_json() -> None:
    timing = Timing.of([0.3, 0.1, 0.2])
    assert (timing.min, timing.median, timing.rounds) == (0.1, 0.2, 3)
    measured = Measurement("step", "a", "about a", 2, {"who": timing}, {"other": "no wheel"}, 0.25)
    assert Measurement.from_json(json.loads(json.dumps(measured.as_json()))) == measured


@pytest.mark.parametrize("dark", [False, True])
def test_the_picture_of_the_readme_has_a_line_for_everyone(tmp_path: Path, dark: bool) -> None:
    found = [
        Measurement(
            kind, str(count), f"{count} x 32, 16 ids", 1, {name: Timing(0.001, count / 1e5, 3) for name in rows.NAMES}
        )
        for kind in rows.PANELS
        for count in (1_000, 10_000)
    ]
    figures.save(tmp_path / "rows.png", (8, 3), lambda figure: rows.draw(figure, found, dark=dark))
    assert is_png(tmp_path / "rows.png")

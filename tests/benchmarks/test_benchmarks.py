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

from benchmarks import contenders, deferred, gpu, host, memory, rows, sparse
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
    for part in ("catch-up before it, when", "Flush of all", "as long as torch Adam"):
        assert part in shown
    beside_dense = {deferred.DEFERRED, deferred.MADE_DENSE, contenders.ADAM}
    assert contenders_of(document) == {
        ("step", "zipf-20k"): {deferred.DEFERRED, deferred.SPARSE, contenders.TORCH},
        ("step", "uniform-50k"): beside_dense,
        ("flush", "zipf-20k"): {deferred.DEFERRED, contenders.ADAM},
        ("share", "5%-of-10k"): beside_dense,
        ("share", "30%-of-10k"): beside_dense,
    }


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
    for part in ("One training step", "Where the step of a sharded table"):
        assert part in shown
    assert set(multiprocessing.active_children()) == before
    names = ("zipf-20k-1", "zipf-20k-2", "3-tables-2")
    assert contenders_of(document) == {("step", name): set(training.WAYS) for name in names}
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
    assert contenders_of(document) == {("rows", case.name): set(rows.NAMES) for case in rows.QUICK}
    assert is_png(tmp_path / "rows.png")


def rows_measured(count: int, dense: float, deferred_: float, sparse_: float) -> Measurement:
    taken = zip(rows.NAMES, (dense, 0.03, deferred_, sparse_), strict=True)
    about = f"{count:,} x 32, 16 uniform ids"
    return Measurement("rows", str(count), about, 1, {name: Timing((seconds,)) for name, seconds in taken})


def test_the_picture_of_the_readme_comes_with_its_paragraph(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "docs").mkdir()
    for page in rows.PAGES:
        (tmp_path / page).write_text((rows.ROOT / page).read_text())
    found = [rows_measured(1_000, 0.001, 0.004, 0.002), rows_measured(10_000, 0.2, 0.01, 0.004)]
    measured = {"quick": False, "measurements": [each.as_json() for each in found]}
    (tmp_path / "rows.json").write_text(given := json.dumps(measured))
    assert rows.main([str(tmp_path / "rows.json"), "--root", str(tmp_path)]) == 0
    for page in rows.PAGES:
        text = " ".join((tmp_path / page).read_text().split())
        assert (
            "dense Adam's step takes 200 ms without making its gradient, `DeferredAdam`'s 10.0 (20.0x faster)" in text
        )
        assert "from 1k to 10k rows its time grows 200x. `SparseAdam`'s grows 2.0x" in text
        assert "Up to 1k rows, dense Adam is faster than `DeferredAdam`." in text
    assert is_png(tmp_path / "docs" / "scaling-rows.png")
    assert json.loads((tmp_path / rows.DATA).read_text()) == json.loads(given)

    (tmp_path / "rows.json").write_text(json.dumps(measured | {"quick": True}))
    assert rows.main([str(tmp_path / "rows.json"), "--root", str(tmp_path)]) == 1
    assert "measure again" in capsys.readouterr().err


@pytest.mark.skipif(not (rows.ROOT / rows.DATA).exists(), reason="not measured yet")
def test_the_picture_of_the_readme_has_the_figures_of_its_data() -> None:
    """After a change of the sentences: `python -m benchmarks.rows docs/scaling-rows.json`."""
    document = json.loads((rows.ROOT / rows.DATA).read_text())
    found = rows.blocks([Measurement.from_json(measured) for measured in document["measurements"]])
    for page, block in found.items():
        assert block in (rows.ROOT / page).read_text()

"""The benchmarks run, write what they say, and time nothing before its results agree. Nothing here asserts a time."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from benchmarks import contenders, deferred
from benchmarks.cases import MANY, ZIPF
from benchmarks.command import main
from benchmarks.deferred import accuracy, measures
from benchmarks.deferred.sizes import FULL
from benchmarks.distributed import many, stopwatch, timings, training, whole
from benchmarks.distributed.agreement import TOLERANCES
from benchmarks.sparse import child, field, fresh
from benchmarks.timing import Measurement, Timing
from tests.helpers.pictures import is_png
from tests.helpers.ranks import Ranks


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, str]]]:
    """What fresh interpreters were to measure is measured in this one: each of them imports torch for seconds."""
    asked = []

    def here(what: str, *arguments: object, **environment: str) -> float | list[float]:
        asked.append((what, environment))
        return child.measure(what, *map(str, arguments))

    monkeypatch.setattr(fresh, "in_fresh_interpreter", here)
    return asked


def test_quick_bench_writes_all_measurements(
    children: list[tuple[str, dict[str, str]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # The kernels run in the test of the bars.
    monkeypatch.setenv("ROWSTEP_BACKEND", "reference")
    assert main(["--quick", "--repeats", "2", "--threads", "1", "--out", str(tmp_path)]) == 0
    assert "One step" in capsys.readouterr().out

    document = json.loads((tmp_path / "bench.json").read_text())
    assert document["command"].startswith("python -m benchmarks --quick")
    assert document["machine"].keys() >= {"cpu", "cores", "torch", "numba", "numpy", "rowstep"}
    assert {measured["kind"] for measured in document["measurements"]} == {"step", "scaling", "loop", "dense"}
    for measured in document["measurements"]:
        for timing in measured["seconds"].values():
            assert 0 < timing["min"] <= timing["median"]
    steps = [measured for measured in document["measurements"] if measured["kind"] == "step"]
    assert set(steps[0]["seconds"]) == {contenders.ROWSTEP, contenders.TORCH, contenders.ADAM, contenders.ROOFLINE}
    assert document["state_bytes_per_weight"] == pytest.approx(8, abs=0.01)
    assert document["first_step_seconds"].keys() == {"cold", "cached", "others"}
    cold, cached, *of_memory = children
    assert cold == cached == ("first-step", {"NUMBA_CACHE_DIR": cold[1]["NUMBA_CACHE_DIR"]})
    if sys.platform.startswith("linux"):
        assert of_memory == [("memory", {})]
        (peak,) = document["peak_memory_bytes_per_id"]
        assert peak.keys() == {"rows", "rowstep", "torch"}
    assert document["bars"] == []


def test_a_step_is_measured_and_drawn_with_each_number_of_threads(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    line = ["--quick", "--only", "uniform-20k", "--repeats", "2", "--threads", "1", "2", "--out", str(tmp_path)]
    assert main(line) == 0
    assert torch.get_num_threads() == before
    assert is_png(tmp_path / "bench.png")
    measurements = json.loads((tmp_path / "bench.json").read_text())["measurements"]
    assert [measured["threads"] for measured in measurements] == [1, 2]


def test_a_fresh_interpreter_answers_with_what_it_measured() -> None:
    assert fresh.in_fresh_interpreter("first-step", ROWSTEP_BACKEND="reference") > 0


def test_bars_are_listed_for_the_cases_they_are_set_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["--only", "uniform-100k", "--repeats", "2", "--threads", "1", "--out", str(tmp_path)]
    assert main(line) == 0
    (bar,) = json.loads((tmp_path / "bench.json").read_text())["bars"]
    assert bar.keys() == {"measure", "limit", "reached", "unit", "at_least", "disturbed", "met"}
    assert "at least 6x" in capsys.readouterr().out


def test_bench_refuses_to_time_results_that_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def off_by_a_little(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SparseAdam(parameters, lr=1.001e-3)

    monkeypatch.setattr(field, "SparseAdam", off_by_a_little)
    assert main(["--quick", "--only", "uniform-20k", "--out", str(tmp_path)]) == 1
    assert "weights differ from torch's" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_quick_deferred_bench_writes_all_measurements(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["deferred", "--quick", "--repeats", "2", "--threads", "1", "--out", str(tmp_path)]
    assert main(line) == 0
    shown = capsys.readouterr().out
    for part in (
        "catch-up before it, when",
        "Flush of all rows",
        "as long as torch Adam",
        "in float64 at most",
        "held-out loss",
    ):
        assert part in shown
    assert is_png(tmp_path / "deferred.png")

    document = json.loads((tmp_path / "deferred.json").read_text())
    measured = {(part["kind"], part["name"]): set(part["seconds"]) for part in document["measurements"]}
    beside_dense = {measures.DEFERRED, measures.MADE_DENSE, contenders.ADAM}
    assert measured == {
        ("step", "zipf-20k"): {measures.DEFERRED, measures.SPARSE, contenders.TORCH},
        ("step", "uniform-50k"): beside_dense,
        ("flush", "zipf-20k"): {measures.DEFERRED, contenders.ADAM},
        ("share", "5%-of-10k"): beside_dense,
        ("share", "30%-of-10k"): beside_dense,
    }
    found = document["accuracy"]
    assert found["float64"] <= accuracy.LARGEST_DIFFERENCE
    assert found["float32"] <= found["torch_float32"]
    losses = document["curves"]["losses"]
    assert losses["DeferredAdam"] == pytest.approx(losses["dense Adam"], rel=1e-4)
    assert losses["SparseAdam"] != pytest.approx(losses["dense Adam"], rel=1e-2)


def test_deferred_bars_are_listed_for_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The full run takes 2,000 steps; how near it comes to torch is for deferred/test_same_as_torch.py to show.
    monkeypatch.setattr(deferred, "FULL", dataclasses.replace(FULL, accuracy_steps=300))
    assert main(["deferred", "--only", "accuracy", "--out", str(tmp_path)]) == 0
    bars = json.loads((tmp_path / "deferred.json").read_text())["bars"]
    assert [(bar["limit"], bar["met"]) for bar in bars] == [(1e-13, True), (1, True)]
    assert not (tmp_path / "deferred.png").exists()


@pytest.mark.parametrize(
    ("change", "message"), [({"lr": 1.001e-3}, "in float64"), ({"fused": True, "eps": 1e-4}, "weights differ")]
)
def test_deferred_bench_refuses_to_time_results_that_differ(
    change: dict[str, Any],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Once the small table in float64, once the table that is timed."""
    adam = torch.optim.Adam

    def off_by_a_little(parameters: Any, **options: Any) -> torch.optim.Optimizer:
        return adam(parameters, **options | (change if options.get("fused") == change.get("fused") else {}))

    monkeypatch.setattr(torch.optim, "Adam", off_by_a_little)
    assert main(["deferred", "--quick", "--only", "flush", "--out", str(tmp_path)]) == 1
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_break_even_lies_between_the_shares_measured() -> None:
    def measured(milliseconds: float) -> Measurement:
        taken = {measures.DEFERRED: milliseconds, contenders.ADAM: 10, measures.MADE_DENSE: 100}
        timings = {name: Timing((time,)) for name, time in taken.items()}
        return Measurement("share", "", "", 1, timings, {}, 0.0)

    shares = [(0.1, measured(5)), (0.2, measured(20))]
    assert [(found.opponent, found.share) for found in measures.break_evens(shares)] == [
        (contenders.ADAM, pytest.approx(0.15)),
        (measures.MADE_DENSE, None),
    ]


def test_quick_distributed_bench_writes_all_measurements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ROWSTEP_BACKEND", "reference")
    before = set(multiprocessing.active_children())
    assert main(["distributed", "--quick", "--repeats", "2", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    for part in (
        "from one process",
        "A rank's bytes",
        "the busiest of 8",
        "the same bits",
        "One torch thread per rank",
        "tables together",
        "Messages of a step",
        "Plans, simulated",
        "Lookup of many tables",
        "One training step of many tables",
    ):
        assert part in shown
    assert set(multiprocessing.active_children()) == before

    document = json.loads((tmp_path / "distributed.json").read_text())
    ways = {training.SHARDED, training.DEFERRED, training.TORCH_DDP, training.OUR_DDP}
    measured = {(part["kind"], part["name"]): set(part["seconds"]) for part in document["measurements"]}
    assert measured == {
        ("step", "zipf-20k-1"): ways,
        ("step", "zipf-20k-2"): ways,
        **{(phase, "3-tables-2"): set(many.WAYS) for phase in many.PHASES},
        ("whole step", "3-tables-2"): set(whole.WAYS),
    }
    for found in document["agreement"] + document["together"]:
        assert max(found["differences"].values()) <= TOLERANCES[found["dtype"]]
    (cost,) = document["costs"]
    assert max(cost["memory"].values()) == pytest.approx(0.5, rel=1e-3)
    assert cost["sent"] == pytest.approx(cost["formula"], rel=0.1)  # few ids: chance decides who owns them
    assert [found["different"] for found in document["checkpoints"]] == [0]
    assert {found["ranks"] for found in document["breakdown_ms"]} == {1, 2}
    for found in document["breakdown_ms"]:
        timed = {stage for stage, time in found["stages"].items() if time > 0}
        assert timed == set(stopwatch.STAGES) - (set(stopwatch.SWAPS.values()) if found["ranks"] == 1 else set())
    assert [(found["tables"], found["collectives"]) for found in document["messages"]] == [(1, 6), (5, 6)]
    for found in document["plans"]:
        assert found["bytes"] == pytest.approx(found["expected_bytes"])
        assert found["load"] == pytest.approx(found["expected_load"], rel=0.1)


def test_distributed_bars_are_listed_for_what_was_measured(tmp_path: Path) -> None:
    assert main(["distributed", "--only", "balance", "--out", str(tmp_path)]) == 0
    (bar,) = json.loads((tmp_path / "distributed.json").read_text())["bars"]
    assert bar["limit"] == 1.1
    assert bar["met"]


def test_distributed_bench_refuses_to_time_results_that_differ() -> None:
    class Answers:
        def run(self, *_: Any) -> list[Any]:
            return [timings.OnRank({training.SHARDED: (difference, 0.0)}, {}, {}, 0.0) for difference in (0.0, 1.0)]

    with pytest.raises(contenders.DisagreementError, match="differ from those of 'torch DDP"):
        timings.steps(cast(Ranks, Answers()), 2, ZIPF, 1, 1)


def test_distributed_bench_refuses_to_time_tables_whose_rows_differ() -> None:
    class Answers:
        def run(self, *_: Any) -> list[Any]:
            return [many.OnRank(off, {}, 0.0) for off in ({}, {many.APART: 1.0})]

    with pytest.raises(contenders.DisagreementError, match="rows of 'tables apart' differ"):
        many.lookups(cast(Ranks, Answers()), 2, MANY, 1)


def test_distributed_bench_takes_no_threads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["distributed", "--threads", "2", "--out", str(tmp_path)]) == 2
    assert "one thread per rank" in capsys.readouterr().err


def test_unknown_part_of_a_suite_exits_with_2_and_names_the_parts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "everything"]) == 2
    assert "zipf-1m" in capsys.readouterr().err


@pytest.mark.parametrize("line", [["--no-such-option"], ["no-such-suite"], ["--repeats", "0"]])
def test_unknown_arguments_exit_with_2(line: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(line)
    assert exit_.value.code == 2
    assert "usage: python -m benchmarks" in capsys.readouterr().err


def test_missing_extra_is_named_with_the_way_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert main(["--quick"]) == 1
    assert "pip install 'rowstep[cli]'" in capsys.readouterr().err


def test_the_bytes_of_every_kind_of_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROWSTEP_BACKEND", "reference")
    assert main(["memory", "--quick", "--only", "uniform-20k", "--repeats", "1", "--out", str(tmp_path)]) == 0
    written = json.loads((tmp_path / "memory.json").read_text())
    kept = written["state_bytes_per_weight"]
    assert {name: round(size, 2) for name, size in kept.items()} == {
        "float32": 8.0, "bfloat16": 4.0, "row": 4.06, "bfloat16 and row": 2.06, "row, no first": 0.06,
        "factored, no first": 0.06,
    }  # fmt: skip

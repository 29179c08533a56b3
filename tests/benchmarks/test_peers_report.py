"""The tables of the suite `peers`, and how they get into docs/peers.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import bars, docs, pages, report
from benchmarks.peers.catalogue import FBGEMM_LOOP, ROWSTEP, ROWSTEP_LOOP, SPARSE_ADAM, STEPS
from benchmarks.peers.sizes import LABELS
from benchmarks.timing import Measurement, Timing
from tests.helpers.pictures import is_png

ADAM = next(peer.name for peer in STEPS if peer.name == "torch Adam(fused)")


def measured(kind: str, threads: int = 1, name: str = "zipf-1m", others: float = 0.0, **seconds: Any) -> Measurement:
    """`seconds` of ours, theirs, dense or fbgemm; a string is the reason why somebody was left out."""
    names = {
        "ours": (ROWSTEP if kind == "step" else ROWSTEP_LOOP).name,
        "theirs": SPARSE_ADAM.name,
        "dense": ADAM,
        "fbgemm": FBGEMM_LOOP.name,
        "rowstep": "rowstep",
        "torch": "torch SparseAdam",
        "roofline": "roofline",
    }
    timings = {names[who]: Timing(tuple(given)) for who, given in seconds.items() if not isinstance(given, str)}
    left_out = {names[who]: given for who, given in seconds.items() if isinstance(given, str)}
    return Measurement(kind, name, "a case", threads, timings, left_out, others)


def test_ratios_are_to_the_first_of_the_same_group() -> None:
    groups = [
        measured("step", ours=[0.001, 0.002, 0.009], theirs=[0.004, 0.01, 0.02]),
        measured("step", ours=[0.01], dense=[0.05]),
    ]
    grid = report.ratios("step", groups)
    assert grid.headings == ["", "rule", "threads", "a case"]
    lines = {line[0]: line[1:] for line in grid.lines}
    assert lines[SPARSE_ADAM.name] == ["same", "1", "5.0x (4.0x)"]  # of medians, and of minima
    assert lines[ADAM] == ["Adam on all rows", "1", "5.0x (5.0x)"]
    assert lines["MXNet, lazy"][2] == ""
    assert ROWSTEP.name not in lines


def test_who_was_left_out_is_in_the_table_and_in_a_sentence() -> None:
    groups = [measured("step", count, ours=[0.001], theirs="no wheel") for count in (1, 2)]
    first, second, *_ = report.ratios("step", groups).lines
    assert first == [SPARSE_ADAM.name, "same", "1", "left out"]
    assert second == ["", "", "2", "left out"]
    assert report.all_left_out(groups) == [
        f"{SPARSE_ADAM.name} was left out of a case on 1 thread, a case on 2 threads: no wheel."
    ]


def test_a_short_table_has_a_line_per_case_and_number_of_threads() -> None:
    groups = [measured("loop", count, ours=[0.001, 0.002, 0.009], fbgemm=[0.004]) for count in (1, 2)]
    grid = report.loops_in_short(groups)
    columns = [grid.headings.index(name) for name in (ROWSTEP_LOOP.name, FBGEMM_LOOP.name)]
    assert [line[:2] for line in grid.lines] == [["a case", "1"], ["", "2"]]
    assert [[line[column] for column in columns] for line in grid.lines] == [["2.00", "4.00"]] * 2


def test_markdown_has_a_line_per_row_and_numbers_to_the_right() -> None:
    grid = report.Grid("title", ["", "rule", "ms"], [["a", "b", "1.0"]], words=2)
    assert grid.markdown().splitlines() == ["|  | rule | ms |", "| --- | --- | ---: |", "| a | b | 1.0 |"]


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.1234, "123"), (0.01234, "12.3"), (0.001234, "1.23"), (2.5, "2,500"), (0.0001234, "0.123")]
)
def test_times_have_three_digits(seconds: float, shown: str) -> None:
    assert report.milliseconds(seconds) == shown


def test_bars_are_by_the_medians_and_name_the_best_peer() -> None:
    cases = [
        measured("step", ours=[0.01], theirs=[0.015]),
        measured("step", threads=2, ours=[0.01], theirs=[0.015]),
        measured("loop", name="bags", ours=[0.01], fbgemm=[0.016]),
    ]
    found = [(bar.limit, round(bar.reached, 3), bar.met) for bar in bars.reached(cases)]
    assert found == [(1, 1.5, True), (2, 1.5, False), (1, 1.5, True), (1.5, 1.6, True)]


def document(quick: bool = False) -> dict[str, Any]:
    cases = [
        measured("step", ours=[0.001], theirs=[0.004], dense="too large"),
        measured("loop", name="bags", ours=[0.001], fbgemm=[0.002], others=0.5),
        *(
            measured(axis, count, str(value), rowstep=[0.001], torch=[0.004], roofline=[0.0005])
            for axis in LABELS
            for value in (1, 2)
            for count in (1, 2)
        ),
    ]
    return {
        "command": "python -m benchmarks peers",
        "quick": quick,
        "machine": dict.fromkeys(("cpu", "cores", "system", "python", "torch", "numba", "numpy"), "?"),
        "measurements": [case.as_json() for case in cases],
        "versions": {ROWSTEP.name: {"python": "3.11.7", "torch": "2.13.0"}},
        "missing": {"MXNet, lazy": "needs a Python from 3.10 to 3.11"},
        "bars": [
            {
                "measure": "m",
                "limit": 2,
                "unit": "x",
                "reached": 1.5,
                "disturbed": False,
                "met": False,
                "at_least": True,
            }
        ],
    }


def test_measurements_come_back_from_json() -> None:
    given = document()
    assert [case.as_json() for case in pages.measurements_of(json.loads(json.dumps(given)))] == [
        json.loads(json.dumps(case)) | {"seconds": case["seconds"]} for case in given["measurements"]
    ]


def write_docs(folder: Path, page: str, **changed: Any) -> int:
    (folder / "page.md").write_text(page)
    (folder / "measured.json").write_text(json.dumps(document(**changed)))
    return docs.main([str(folder / "measured.json"), "--page", str(folder / "page.md"), "--docs", str(folder)])


def test_the_page_and_the_readme_have_the_figures_of_their_data() -> None:
    """After a change of page.md: `python -m benchmarks.peers.docs docs/peers.json`."""
    blocks = pages.blocks(json.loads((docs.DOCS / "peers.json").read_text()))
    text, missing = docs.filled(docs.PAGE.read_text(), blocks)
    assert not missing
    assert (docs.DOCS / "peers.md").read_text() == text
    assert blocks["loop-short"] in (docs.DOCS.parent / "README.md").read_text()


def test_docs_are_filled_and_drawn_from_the_file(tmp_path: Path) -> None:
    assert write_docs(tmp_path, "before\n\n<!-- measured: step-ratios -->\n\nafter\n") == 0
    text = (tmp_path / "peers.md").read_text()
    assert "| torch SparseAdam | same | 1 | 4.0x (4.0x) |" in text
    assert text.startswith("before\n\n|")
    assert text.endswith("|\n\nafter\n")
    assert all(is_png(tmp_path / name) for name in ("peers.png", "scaling.png", "scaling-rows.png"))
    assert json.loads((tmp_path / "peers.json").read_text()) == json.loads((tmp_path / "measured.json").read_text())


def test_docs_refuse_a_run_of_some_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert write_docs(tmp_path, "<!-- measured: step-ratios -->\n<!-- measured: by-nothing -->\n") == 1
    assert "lacks by-nothing" in capsys.readouterr().err
    assert not (tmp_path / "peers.md").exists()


def test_docs_refuse_the_figures_of_a_quick_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert write_docs(tmp_path, "", quick=True) == 1
    assert "measure again" in capsys.readouterr().err


def test_blocks_tell_who_is_missing_and_what_was_disturbed() -> None:
    blocks = pages.blocks(document())
    assert "missing: needs a Python from 3.10 to 3.11" in blocks["contestants"]
    assert "during 1 of the measurements" in blocks["machine"]
    assert "2.00 (2.00) *" in blocks["loop-times"]
    assert "*" not in blocks["step-times"]
    assert "too large" in blocks["step-left-out"]
    assert "| m | at least 2x | 1.50x | **no** |" in blocks["bars"]


def test_the_page_asks_for_blocks_that_a_run_makes() -> None:
    asked = {place["name"] for place in docs.PLACE.finditer(docs.PAGE.read_text())}
    assert asked
    assert asked <= pages.blocks(document()).keys()

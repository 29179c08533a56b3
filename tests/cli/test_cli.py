"""The command line runs, shows what it says, and answers with the right exit code. Nothing here asserts a time."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch

import rowstep
from rowstep.cli import _inspect, main


def test_python_m_rowstep_is_the_same_command() -> None:
    command = [sys.executable, "-m", "rowstep", "--version"]
    assert subprocess.check_output(command, text=True) == f"rowstep {rowstep.__version__}\n"


def test_demo_shows_neighbours_and_a_comparison_and_stops_in_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--steps", "12"]) == 0
    shown = capsys.readouterr().out
    for part in ("exception", "optimizer step", "whole training step", "largest difference"):
        assert part in shown
    assert main(["demo", "--steps", "50", "--seconds", "0"]) == 0
    assert "Stopped after 1 of 50 steps" in capsys.readouterr().out


def test_bench_shows_one_line_per_optimizer_and_number_of_threads(capsys: pytest.CaptureFixture[str]) -> None:
    before = torch.get_num_threads()
    assert main(["bench", "--quick", "--seconds", "0", "--threads", "1", "2"]) == 0
    assert torch.get_num_threads() == before
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    kinds = [(name, threads) for name in ("SparseAdam", "DeferredAdam") for threads in ("1", "2")]
    time = r"[\d.,]+ \([\d.,]+\)"
    for line, (name, threads) in zip(lines, kinds, strict=True):
        cells = rf"{name}\|10,000 x 16, 1,024 ids\|{threads}\|5\|{time}\|{time}\|[\d.,]+x"
        assert re.fullmatch(cells, "|".join(cell.strip() for cell in line.split("│")[1:-1]))


@pytest.mark.parametrize(("ours", "theirs"), [("SparseAdam", "SparseAdam"), ("DeferredAdam", "Adam")])
def test_bench_refuses_to_time_results_that_differ(
    ours: str, theirs: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = getattr(torch.optim, theirs)
    monkeypatch.setattr(torch.optim, theirs, lambda params, **options: real(params, lr=1.001e-3, **options))
    assert main(["bench", "--quick", "--seconds", "0", "--threads", "1"]) == 1
    shown = capsys.readouterr()
    assert f"rowstep: {ours}, 10,000 x 16, 1,024 ids: weights differ from torch's" in shown.err
    assert not shown.out


@pytest.mark.parametrize(
    "line",
    [[], ["no-such-command"], ["bench", "--no-such-option"], ["bench", "no-such-suite"], ["demo", "--steps", "0"]],
)
def test_unknown_arguments_exit_with_2(line: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(line)
    assert exit_.value.code == 2
    assert "usage: rowstep" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["demo", "bench"])
def test_missing_extra_is_named_with_the_way_to_install_it(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert main([command]) == 1
    assert "needs rich, which is not installed: pip install 'rowstep[cli]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (KeyboardInterrupt(), 130, "rowstep: interrupted\n"),
        (PermissionError(13, "Permission denied", "out/x"), 1, "rowstep: out/x: Permission denied\n"),
        (OSError("the disk is gone"), 1, "rowstep: x: cannot be read: the disk is gone\n"),
    ],
)
def test_what_ends_a_command_is_one_sentence(
    error: BaseException, code: int, sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(_inspect, "read", fail)
    assert main(["inspect", "x"]) == code
    assert capsys.readouterr().err == sentence

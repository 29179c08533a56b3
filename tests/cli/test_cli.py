"""The command line runs, shows what it says, and answers with the right exit code. Nothing here asserts a time."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch

import rowstep
from rowstep.cli import _inspect, main


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"rowstep {rowstep.__version__}\n"


def test_python_m_rowstep_is_the_same_command() -> None:
    def run(*arguments: str) -> tuple[int, str, str]:
        command = [sys.executable, "-m", "rowstep", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout, done.stderr

    assert run("--version") == (0, f"rowstep {rowstep.__version__}\n", "")
    code, shown, error = run("no-such-command")
    assert (code, shown) == (2, "")
    assert error.startswith("usage: rowstep ")


def test_demo_shows_neighbours_and_a_comparison(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--steps", "12", "--batch", "256", "--dim", "8"]) == 0
    shown = capsys.readouterr().out
    for part in ("exception", "optimizer step", "whole training step", "largest difference"):
        assert part in shown


def test_demo_stops_when_its_time_is_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--steps", "50", "--seconds", "0", "--batch", "64", "--dim", "4"]) == 0
    assert "Stopped after 1 of 50 steps" in capsys.readouterr().out
    assert main(["demo", "--batch", "100000000"]) == 1
    assert "rowstep: the batch has 100,000,000 pairs; expected at most" in capsys.readouterr().err


def test_bench_shows_one_line_per_optimizer_and_number_of_threads(capsys: pytest.CaptureFixture[str]) -> None:
    before = torch.get_num_threads()
    assert main(["bench", "--quick", "--seconds", "0", "--threads", "1", "2"]) == 0
    assert torch.get_num_threads() == before
    lines = [line.split("│")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    cells = [[cell.strip() for cell in line] for line in lines]
    small, rounds = "10,000 x 16, 1,024 ids", "5"
    assert [line[:4] for line in cells] == [
        [name, small, threads, rounds] for name in ("SparseAdam", "DeferredAdam") for threads in ("1", "2")
    ]
    for *_, ours, theirs, ratio in cells:
        assert all(re.fullmatch(r"[\d.,]+ \([\d.,]+\)", time) for time in (ours, theirs))
        assert re.fullmatch(r"[\d.,]+x", ratio)


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
    "line", [[], ["bench", "--no-such-option"], ["bench", "no-such-suite"], ["demo", "--steps", "0"]]
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
        (OSError("the disk is gone"), 1, "rowstep: the disk is gone\n"),
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

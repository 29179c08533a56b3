"""The command line runs, shows what it says, and answers with the right exit code. Nothing here asserts a time."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest

from pictures import is_png
from rowstep.cli import main


def test_demo_shows_neighbours_and_a_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--out", str(tmp_path), "--steps", "12", "--batch", "256", "--dim", "8"]) == 0
    shown = capsys.readouterr().out
    for part in ("exception", "optimizer step", "whole training step", "largest difference"):
        assert part in shown
    assert is_png(tmp_path / "demo_loss.png")


def test_demo_stops_when_its_time_is_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--out", str(tmp_path), "--steps", "50", "--seconds", "0", "--batch", "64", "--dim", "4"]) == 0
    assert "Stopped after 1 of 50 steps" in capsys.readouterr().out


@pytest.mark.parametrize("line", [[], ["no-such-command"], ["demo", "--no-such-option"], ["demo", "--steps", "0"]])
def test_unknown_arguments_exit_with_2(line: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(line)
    assert exit_.value.code == 2
    assert "usage: rowstep" in capsys.readouterr().err


@pytest.mark.parametrize("package", ["rich", "matplotlib"])
def test_missing_extra_is_named_with_the_way_to_install_it(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = builtins.__import__

    def without_package(name: str, *arguments: Any, **keywords: Any) -> Any:
        if name.split(".")[0] == package:
            raise ImportError(name)
        return real(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", without_package)
    assert main(["demo"]) == 1
    assert "pip install 'rowstep[cli]'" in capsys.readouterr().err

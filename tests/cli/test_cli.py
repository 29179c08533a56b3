"""The command line runs, shows what it says, and answers with the right exit code. Nothing here asserts a time."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

import rowstep
from rowstep.cli import _demo, main
from rowstep.cli.extras import CommandError

COMMANDS = ("demo", "warm-up")


@pytest.fixture
def small_demo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A table so small that no step takes long, without compiled kernels."""
    monkeypatch.setenv("ROWSTEP_BACKEND", "reference")
    for name, value in {"ROWS": 2_000, "COLUMNS": 8, "BATCH": 256}.items():
        monkeypatch.setattr(_demo, name, value)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_python_m_rowstep_is_the_same_command() -> None:
    command = [sys.executable, "-m", "rowstep", "--version"]
    assert subprocess.check_output(command, text=True) == f"rowstep {rowstep.__version__}\n"


@pytest.mark.usefixtures("small_demo")
def test_demo_compares_losses_after_the_same_steps(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--steps", "60", "--seconds", "600"]) == 0
    shown, progress = capsys.readouterr()
    assert [line.split()[0] for line in progress.splitlines()] == list(_demo.CONTENDERS)
    assert progress.count("60 of 60 steps, loss ") == 4
    rows = re.findall(r"^(\S+) +[\d,.]+ +[\d.]+x +([\d.]+) +60 +([\d.]+)$", shown, re.MULTILINE)
    assert [name for name, *_ in rows] == list(_demo.CONTENDERS)
    dense, theirs, ours, deferred = (float(loss) for _, loss, _ in rows)
    # Equal up to the rounding of float32, which may show in the last of four digits.
    assert (deferred, ours) == pytest.approx((dense, theirs), abs=2e-4)
    assert dense < theirs - 1e-2  # rows that wait learn from their momentum
    assert dense < 2.5  # guessing: ln 16 = 2.77
    assert "nan" not in shown
    assert "Out of time" not in shown


@pytest.mark.usefixtures("small_demo")
def test_demo_says_who_ran_out_of_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--steps", "1000000", "--seconds", "1e-9"]) == 0
    shown = capsys.readouterr().out
    assert "loss, step 1 " in shown
    assert "Out of time after 1e-09 seconds: torch.optim.Adam (1 of 1000000 steps), torch.optim.SparseAdam (1 " in shown
    assert "nan" not in shown


@pytest.mark.usefixtures("small_demo")
def test_demo_runs_where_its_progress_cannot_be_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)  # as with 2>&-
    assert main(["demo", "--steps", "1"]) == 0


def test_the_bars_of_the_demo() -> None:
    """The longest is full, and a value that is not 0 is visible."""
    longest, _ = _demo._chart({"a": 8.0, "b": 1e-6})
    assert longest.endswith(" " + "█" * 40 + " 8.0")
    assert _demo._bar(1e-9, width=40) == "▏"
    assert _demo._bar(0, width=40) == ""
    assert _demo._bar(0.5, width=5) == "██▌"


@pytest.mark.parametrize(
    "line",
    [
        [], ["no-such-command"], ["bench"], ["demo", "--no-such-option"], ["demo", "--steps", "0"],
        ["demo", "--steps", "many"], ["demo", "--seconds", "-1"], ["demo", "--seconds", "nan"],
        ["demo", "--seconds", "inf"], ["demo", "--threads", "99999"], ["demo", "--threads", "0"],
        ["warm-up", "--dtype", "int8"],
    ],
)  # fmt: skip
def test_bad_arguments_exit_with_2_and_say_what_was_expected(
    line: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(line)
    assert exit_.value.code == 2
    shown = capsys.readouterr().err
    assert "usage: rowstep" in shown
    assert shown.splitlines()[-1].startswith("rowstep")
    if line[:1] == ["demo"] and line[2:]:
        assert re.search(rf"argument {line[1]}: must be a (whole|finite) number .*, not '{line[2]}'", shown)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example_that_is_accepted(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([command, "--help"])
    assert exit_.value.code == 0
    example = re.search(r"^Example: rowstep (.*)", capsys.readouterr().out, re.MULTILINE)
    assert example is not None
    assert rowstep.cli._parser().parse_args(example[1].split()).module == f"_{command.replace('-', '_')}"


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (KeyboardInterrupt(), 130, "rowstep: interrupted\n"),
        (PermissionError(13, "Permission denied", "out/x"), 1, "rowstep: out/x: Permission denied\n"),
        (CommandError("expected a compiler"), 1, "rowstep: expected a compiler\n"),
    ],
)
def test_what_ends_a_command_is_one_sentence(
    error: BaseException, code: int, sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(_demo, "run", fail)
    assert main(["demo"]) == code
    assert capsys.readouterr().err == sentence


def test_an_interrupted_demo_ends_with_one_sentence_and_130() -> None:
    environment = os.environ | {"ROWSTEP_BACKEND": "reference"}
    program = "import sys; from rowstep.cli import _demo, main; _demo.ROWS = 100; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "demo", "--steps", "1000000", "--seconds", "600"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        while "Each optimizer" not in process.stdout.readline():  # from here on it trains
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, shown = process.communicate(timeout=300)
    assert process.returncode == 130
    assert [line for line in shown.splitlines() if line][-1] == "rowstep: interrupted"
    assert "Traceback" not in shown


TOO_OLD = "import torch; torch.__version__ = torch.torch_version.TorchVersion('2.7.1')"


@pytest.mark.parametrize(
    ("torch_is", "sentence"),
    [
        ("sys.modules['torch'] = None", "needs torch, which is not installed: pip install torch"),
        (TOO_OLD, "torch 2.7.1 is installed, but rowstep needs torch 2.8 or newer"),
    ],
)
def test_without_a_torch_that_works(torch_is: str, sentence: str) -> None:
    program = f"import sys; {torch_is}; from rowstep.cli import main; sys.exit(main(['demo']))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(f"rowstep: {sentence}")
    assert done.stderr.count("\n") == 1

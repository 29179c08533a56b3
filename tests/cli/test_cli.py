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
    assert re.search(r"^ +whole loop +optimizer step alone +loss after\n +ms +speed +ms +speed +60 steps$", shown, re.M)
    rows = re.findall(r"^(\S+)(?: +[\d,.]+ +[\d,.]+x){2} +([\d.]+)$", shown, re.MULTILINE)
    assert [name for name, _ in rows] == list(_demo.CONTENDERS)
    dense, theirs, ours, deferred = (float(loss) for _, loss in rows)
    # Equal up to the rounding of float32, which may show in the last of four digits.
    assert (deferred, ours) == pytest.approx((dense, theirs), abs=2e-4)
    assert dense < theirs - 1e-2  # rows that wait learn from their momentum
    assert dense < 2.5  # guessing: ln 16 = 2.77
    assert "nan" not in shown
    assert "Out of time" not in shown


@pytest.mark.usefixtures("small_demo")
def test_demo_says_who_ran_out_of_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--steps", "1000000", "--seconds", "1e-9"]) == 0
    shown, progress = capsys.readouterr()
    assert " 1 step\n" in shown
    late = "Out of time after 1e-09 seconds: torch.optim.Adam (1 of 1,000,000 steps), torch.optim.SparseAdam (1 "
    assert late in " ".join(shown.split())
    assert "nan" not in shown
    assert max(map(len, (*shown.splitlines(), *progress.splitlines()))) <= 80


def test_the_demo_counts_in_english_and_fits_80_columns() -> None:
    times = [1.2345678] * 2
    runs = [_demo.Run(name, [2.5] * 2, times, times, 10**9) for name in _demo.CONTENDERS]
    runs[-1] = _demo.Run(runs[-1].name, [2.5] * 2, [1e-3], [5e-4], 10**9)
    lines = "\n".join(_demo.report(runs, 3, 1)).splitlines()
    assert max(map(len, lines)) <= 80
    assert "Out of time after 1 second: " in "\n".join(lines)
    assert _demo._count(1.0, "second") == "1 second"
    assert _demo._count(300, "step") == "300 steps"


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
    ("error", "sentence"),
    [
        (PermissionError(13, "Permission denied", "out/x"), "rowstep: out/x: Permission denied\n"),
        (CommandError("expected a compiler"), "rowstep: expected a compiler\n"),
    ],
)
def test_what_ends_a_command_is_one_sentence(
    error: BaseException, sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(_demo, "run", fail)
    assert main(["demo"]) == 1
    assert capsys.readouterr().err == sentence


def test_an_interrupted_demo_ends_with_one_sentence_and_130() -> None:
    environment = os.environ | {"ROWSTEP_BACKEND": "reference"}
    program = "from rowstep.cli import _demo; from rowstep.__main__ import main; _demo.ROWS = 100; main()"
    command = [sys.executable, "-c", program, "demo", "--steps", "1000000", "--seconds", "600"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        while "cores." not in process.stdout.readline():  # from here on it trains
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, shown = process.communicate(timeout=300)
    assert process.returncode == 130
    assert shown == "rowstep: interrupted\n"


INTERRUPT_AT_IMPORT = """
import os, signal, sys
module = sys.argv.pop()
def interrupt(event, args):
    if event == "import" and args[0] == module:
        os.kill(os.getpid(), signal.SIGINT)
sys.addaudithook(interrupt)
from rowstep.__main__ import main
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("command", "module"),
    [
        ("demo", "argparse"), ("demo", "torch._C"), ("warm-up", "numpy._core._multiarray_umath"),
        ("warm-up", "numba.core.types"),
    ],
)  # fmt: skip
def test_an_interrupt_while_modules_are_imported_ends_in_one_line(command: str, module: str) -> None:
    """Whatever torch and NumPy make of an exception in the middle of their imports."""
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPT_AT_IMPORT, command, module], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (130, "rowstep: interrupted\n")


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

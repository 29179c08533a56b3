"""Run the core tests with the oldest torch that rowstep supports, with the newest, and with two in between.

    make versions                  # all of them; writes the table of docs/versions.md
    make versions TORCH=2.8.0      # one, or several between quotes; prints their table

Each version gets a fresh environment, deleted before the next is made: PyPI's Linux builds of torch bring several GB of
CUDA packages. A version that fails does not stop the others. The exit code is 1 if any failed. This file needs nothing
but Python; the environments get the same Python.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

NEWEST = "newest"
VERSIONS = ("2.8.0", "2.10.0", "2.13.0", NEWEST)

# What meets torch: its numbers, its checkpoints, its modules and tracers, its process groups.
TESTS = """
sparse/test_same_as_torch docs/test_torch_words sparse/test_dtypes sparse/test_gradients state/test_state_dict
state/test_plain_checkpoints sparse/test_optimizer_surface sparse/test_bad_input clip/test_clip
deferred/test_same_as_torch deferred/test_wrapped distributed/test_collection
distributed/test_sharded_checkpoints distributed/test_ddp distributed/test_ddp_around
docs/test_torch_version
"""

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "versions.md"
ENVIRONMENT = ROOT / ".venv-versions"

COLUMNS = ("torch", "Python", "numba", "numpy", "passed", "failed", "skipped", "seconds")
ASK = """
import json, platform, numba, numpy, torch
print(json.dumps([torch.__version__, platform.python_version(), numba.__version__, numpy.__version__]))
"""


class Outcome(NamedTuple):
    """How a run of the tests ended."""

    versions: tuple[str, ...]
    """Of torch, Python, numba and numpy."""
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    code: int = 0
    """The exit code of pytest or, before that, of what failed."""

    @property
    def is_good(self) -> bool:
        return self.code == 0 and self.failed == 0 and self.passed > 0


def main(wanted: Sequence[str]) -> int:
    """Try these versions, or all; print the table, and keep it if it is complete."""
    outcomes = []
    for version in wanted or VERSIONS:
        print(f"== torch {version}", flush=True)
        outcomes.append(try_version(version))
    text = table(outcomes)
    print(text, end="")
    if not wanted:
        PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), text), encoding="utf-8")
    bad = [outcome.versions[0] for outcome in outcomes if not outcome.is_good]
    if bad:
        print(f"failed with torch {', '.join(bad)}", file=sys.stderr)
    return 1 if bad else 0


def try_version(version: str) -> Outcome:
    """Make an environment with this torch, run the tests in it, and delete it."""
    versions: tuple[str, ...] = (version, "", "", "")
    try:
        python = make_environment(version)
        versions = tuple(json.loads(subprocess.run([python, "-c", ASK], stdout=subprocess.PIPE, check=True).stdout))
        return run_tests(python, versions)
    except subprocess.CalledProcessError as error:
        print(f"torch {version}: {error}", file=sys.stderr, flush=True)
        return Outcome(versions, code=error.returncode)
    finally:
        shutil.rmtree(ENVIRONMENT, ignore_errors=True)


def make_environment(version: str) -> str:
    """Install rowstep, this torch, and everything else as in constraints.txt; return the path of the Python there."""
    shutil.rmtree(ENVIRONMENT, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENT)], check=True)
    python = str(ENVIRONMENT / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python"))
    constraints = ENVIRONMENT / "constraints.txt"
    constraints.write_text(without_torch((ROOT / "constraints.txt").read_text(encoding="utf-8")), encoding="utf-8")
    torch = "torch" if version == NEWEST else f"torch=={version}"
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", str(constraints)]
    subprocess.run([*install, torch, f"{ROOT}[dev]"], check=True)
    return python


def run_tests(python: str, versions: tuple[str, ...]) -> Outcome:
    """Run the core tests and count."""
    report = ENVIRONMENT / "report.xml"
    files = [f"tests/{name}.py" for name in TESTS.split()]
    begin = time.monotonic()
    command = [python, "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal", f"--junitxml={report}", *files]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    seconds = time.monotonic() - begin
    counts = counted(report.read_text(encoding="utf-8")) if report.exists() else (0, 0, 0)
    return Outcome(versions, *counts, seconds, code)


def counted(report: str) -> tuple[int, int, int]:
    """How many tests passed, failed and were skipped, from pytest's report in XML."""
    suites = ElementTree.fromstring(report).iter("testsuite")
    numbers = [[int(suite.attrib[key]) for key in ("tests", "failures", "errors", "skipped")] for suite in suites]
    tests, failures, errors, skipped = map(sum, zip(*numbers, strict=True))
    return tests - failures - errors - skipped, failures + errors, skipped


def without_torch(constraints: str) -> str:
    """The same constraints, but for the version of torch."""
    return re.sub(r"(?m)^torch==.*\n", "", constraints)


def table(outcomes: Sequence[Outcome]) -> str:
    """The outcomes in Markdown, a line each."""
    lines: list[tuple[str, ...]] = [COLUMNS, ("---",) * 4 + ("---:",) * 4]
    for outcome in outcomes:
        if outcome.passed + outcome.failed == 0:
            lines.append((*outcome.versions, "", "did not run", "", ""))
        else:
            counts = (outcome.passed, outcome.failed, outcome.skipped, round(outcome.seconds))
            lines.append((*outcome.versions, *map(str, counts)))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def with_table(page: str, text: str) -> str:
    """The page with this table in the place of its first."""
    new, count = re.subn(r"(?m)(?:^\|.*\n)+", lambda _: text, page, count=1)
    if count == 0:
        raise ValueError(f"{PAGE.name} has no table to replace; expected lines that begin with '|'")
    return new


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

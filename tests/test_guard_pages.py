"""No kernel reads or writes beyond its operands: they lie at the edge of memory that can be touched."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "guarded_updates.py"

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="guard pages are made as Linux has them")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"ROWSTEP_BACKEND": "numba"}
    command = [sys.executable, "-X", "faulthandler", str(PROGRAM), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.parametrize("what", ["updates", "deferred", "arrays"])
def test_operands_at_the_edge_of_memory(what: str) -> None:
    done = run(what)
    last = done.stdout.strip().splitlines()[-1:]
    assert (done.returncode, last) == (0, ["all held"]), done.stderr[-3000:]


@pytest.mark.parametrize("edge", ["start", "end"])
def test_one_byte_too_far_would_be_found_out(edge: str) -> None:
    assert run("overrun", edge).returncode == -signal.SIGSEGV

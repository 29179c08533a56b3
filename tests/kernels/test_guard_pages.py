"""No kernel reads or writes beyond its operands: they lie at the edge of memory that can be touched, or have none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="guard pages are made as Linux has them")


def test_operands_at_the_edge_of_memory() -> None:
    """In a process of its own: reading or writing one byte too far would end it, and its last line says where."""
    environment = os.environ | {"ROWSTEP_BACKEND": "numba"}
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.helpers.guarded_updates"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=ROOT)
    last = done.stdout.strip().splitlines()[-1:]
    assert (done.returncode, last) == (0, ["all held"]), done.stderr[-3000:]

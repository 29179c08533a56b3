"""Every kernel compiles for the devices that we name, without one of them, for all that the package can ask for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import interpreter as interpreter  # skips, without Triton
from tests.helpers.deferred_cases import LONG

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("target", ["cuda:80", "cuda:90", "hip:gfx942"])
def test_every_kernel_compiles(target: str, tmp_path: Path) -> None:
    """In a process of its own: in this one kernels are interpreted. ``make stress`` tries every combination."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.gpu.compiled", target, "all" if LONG else "pairs"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["kernels"] > 30

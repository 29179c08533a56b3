"""A crash of a test process is told with its test and the stacks of its threads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CRASHES = """
import ctypes, resource

def test_before():
    pass

def test_crash():
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # leaves no core dump in the checkout
    ctypes.string_at(0)
"""


def test_the_record_of_a_worker_is_printed(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from tests.helpers.crash_records import *")
    (tmp_path / "test_it.py").write_text(CRASHES)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "1", "--rootdir", str(tmp_path)]
    root, environment = Path(__file__).parents[2], os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [*command, str(tmp_path)], cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    record = done.stdout.partition("a test process has crashed")[2]
    assert "test_it.py::test_crash" in record, done.stdout + done.stderr
    assert "Segmentation fault" in record
    assert "in test_crash" in record

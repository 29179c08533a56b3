"""What a crash of a test process would tell: the test that ran, and what every thread was doing.

Hooks of pytest; ``conftest`` has them. Each process writes into a file of its own, and the process that reports prints
the files of those that crashed. Under pytest-xdist a worker's own output would be lost.
"""

from __future__ import annotations

import faulthandler
import os
import resource
import tempfile
from pathlib import Path
from typing import IO, Any

import pytest

__all__ = [
    "pytest_configure", "pytest_configure_node", "pytest_runtest_protocol", "pytest_terminal_summary",
    "pytest_unconfigure",
]  # fmt: skip

_FOLDER, _FILE = pytest.StashKey[Path](), pytest.StashKey[IO[str]]()


@pytest.hookimpl(trylast=True)  # after pytest's own plugin, which lets faulthandler write to stderr
def pytest_configure(config: pytest.Config) -> None:
    told = getattr(config, "workerinput", {}).get("crash_records")
    folder = Path(told or tempfile.mkdtemp(prefix="rowstep-crashes-"))
    file = (folder / str(os.getpid())).open("w")
    faulthandler.enable(file, all_threads=True)
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (most, most))  # a core dump where the system allows one
    config.stash[_FOLDER], config.stash[_FILE] = folder, file


def pytest_configure_node(node: Any) -> None:
    """Called by pytest-xdist before it starts a worker."""
    node.workerinput["crash_records"] = str(node.config.stash[_FOLDER])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    file = item.config.stash[_FILE]
    file.seek(0)
    file.truncate()
    file.write(f"{item.nodeid}\n")
    file.flush()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    for path in sorted(config.stash[_FOLDER].iterdir()):
        record = path.read_text()
        if "Fatal Python error" in record:
            terminalreporter.section("a test process has crashed")
            terminalreporter.write_line(record)


def pytest_unconfigure(config: pytest.Config) -> None:
    """A record stays where it is if its process has crashed."""
    faulthandler.disable()
    config.stash[_FILE].close()
    Path(config.stash[_FILE].name).unlink()
    if not hasattr(config, "workerinput") and not any(config.stash[_FOLDER].iterdir()):
        config.stash[_FOLDER].rmdir()

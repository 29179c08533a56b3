"""Other people's ways of training, each rebuilt as a short program. ``make clients`` runs them.

Every program runs twice, with torch's optimizer and with ours in the same line, and both must have the same weights and
state after every step. They take a minute or two and packages of their own, so that the ordinary tests leave them out.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.clients.side_by_side import REPORT

HERE = Path(__file__).parent
WANTED = os.environ.get("ROWSTEP_CLIENTS") == "1"


class Client(pytest.Module):
    """A file that stands for one program."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        if not WANTED:
            pytest.skip("`make clients` runs it")
        with warnings.catch_warnings():  # what packages do while they are imported is not ours to mend
            warnings.simplefilter("ignore")
            return list(super().collect())


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return Client.from_parent(parent, path=module_path) if module_path.parent == HERE else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if REPORT:
        terminalreporter.section("clients")
        terminalreporter.write_line("\n".join(REPORT))

"""Training with other people's packages. ``make integration`` installs them and runs these tests.

A file's name says which package it needs: test_lightning.py is skipped where lightning is not installed, and fails
under ROWSTEP_INTEGRATION=1, so that a package which went missing does not go unnoticed.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.helpers.ratings import RIVALS, Rivals

HERE = Path(__file__).parent
# PyKEEN keeps what it has read of its data sets, by default in the home directory. It looks here when it is imported.
os.environ["PYSTOW_HOME"] = str(Path(tempfile.gettempdir()) / "rowstep-pystow")

# Nothing here is on a hub, so nothing is to be looked for there.
os.environ["HF_HUB_OFFLINE"] = "1"

ALL_REQUIRED = os.environ.get("ROWSTEP_INTEGRATION") == "1"


class Guest(pytest.Module):
    """A file that needs the package it is named after."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        package = self.path.stem.removeprefix("test_")
        if importlib.util.find_spec(package) is None and not ALL_REQUIRED:
            pytest.skip(f"{package} is not installed; `make integration` installs it")
        with warnings.catch_warnings():  # what packages do while they are imported is not ours to mend
            warnings.simplefilter("ignore", DeprecationWarning)
            return list(super().collect())


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return Guest.from_parent(parent, path=module_path) if module_path.parent == HERE else None


@pytest.fixture(params=RIVALS)
def rivals(request: pytest.FixtureRequest) -> Rivals:
    return RIVALS[request.param]

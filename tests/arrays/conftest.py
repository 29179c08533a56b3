"""Fixtures for the tests of files."""

from __future__ import annotations

import pytest


@pytest.fixture
def reference_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files and checks do not depend on the backend: compile nothing."""
    monkeypatch.setenv("ROWSTEP_BACKEND", "reference")

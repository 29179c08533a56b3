from __future__ import annotations

import pytest


@pytest.fixture
def reference_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """For files and checks, which do not depend on the backend: compile nothing."""
    monkeypatch.setenv("ROWSTEP_BACKEND", "reference")

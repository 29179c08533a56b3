"""What the tests of the GPU kernels get: the backend that they are for."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def triton_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROWSTEP_BACKEND", "triton")

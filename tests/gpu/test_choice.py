"""Where Triton cannot compile the kernels or launch them, the reference runs, and a warning says why."""

from __future__ import annotations  # noqa: I001  Triton is looked for first

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rowstep import _backends
from tests.helpers import interpreter as interpreter  # skips, without Triton

import triton


@pytest.fixture(autouse=True)
def chosen_anew() -> Iterator[None]:
    _backends._load.cache_clear()
    yield
    _backends._load.cache_clear()


def refused(reason: str) -> None:
    with pytest.warns(RuntimeWarning, match=f"slow reference implementation on the GPU, because .*{reason}"):
        assert _backends._load("", on_cpu=False) is None
    with pytest.raises(ImportError, match=f"ROWSTEP_BACKEND is 'triton', but Triton cannot be used: .*{reason}"):
        _backends._load("triton", on_cpu=False)


def test_a_triton_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "__version__", "3.6.0+git1234")
    refused("Triton 3.6.0.* expected 3.7 or newer")


def test_a_machine_without_a_c_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    class Driver:
        @property
        def active(self) -> Any:
            raise RuntimeError("Failed to find C compiler.")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(triton.runtime, "driver", Driver())
    refused("Failed to find C compiler.* expected a C compiler and Python's headers")


@pytest.mark.filterwarnings("error")
def test_without_triton_nobody_is_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert _backends._load("", on_cpu=False) is None

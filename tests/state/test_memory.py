"""Where the memory of the state comes from, and when it is given back."""

from __future__ import annotations

import mmap
import weakref
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from rowstep import DeferredAdam, SparseAdam
from tests.helpers.gradients import rows_of, step_with, table

pytestmark = pytest.mark.usefixtures("backend")


def test_huge_pages_are_only_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel may be built without them: then madvise is an error."""

    class WithoutHugePages(mmap.mmap):
        def madvise(self, *_: Any) -> None:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr("rowstep._memory.mmap.mmap", WithoutHugePages)
    param = Parameter(torch.zeros(1 << 15, 64))  # 8 MB: large enough to ask for them
    optimizer = SparseAdam([param])
    step_with(optimizer, param, rows_of(param, [0, 1 << 14]))
    assert optimizer.state[param]["exp_avg"].count_nonzero() == 128


def test_a_dropped_optimizer_is_freed_at_once() -> None:
    param = table(6, 2)
    for cls in (SparseAdam, DeferredAdam):
        optimizer = cls([param])
        step_with(optimizer, param, rows_of(param, [2]))
        gone = weakref.ref(optimizer)
        del optimizer
        assert gone() is None

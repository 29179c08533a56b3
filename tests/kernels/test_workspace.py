"""Memory that kernels keep between launches: enough that most steps allocate nothing, and no more."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator

import pytest
from numba import types

from rowstep._kernels import workspace as kept_memory
from rowstep._kernels.rows import Kind, over_rows
from rowstep._kernels.workspace import Workspace, borrow

MB = 1 << 20
FLOAT = types.float32
KERNEL = over_rows(Kind(FLOAT, FLOAT, FLOAT, FLOAT, FLOAT))


@pytest.fixture(autouse=True)
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(kept_memory, "_free", {})
    borrow(Workspace).give_back()  # compiles what it needs
    tracemalloc.start()
    yield
    tracemalloc.stop()


def reserved(ids: int, columns: int) -> Workspace:
    """A workspace for a launch over so many ids, which then has been given back."""
    workspace = borrow(Workspace, KERNEL)
    workspace.add(ids, columns, 0)
    workspace.reserve(1)
    workspace.give_back()
    return workspace


def test_a_step_like_the_last_allocates_nothing() -> None:
    workspace = reserved(5000, 32)
    keys, rows = workspace._keys, workspace._rows
    for ids, columns in ((5000, 32), (64, 16)):
        assert reserved(ids, columns) is workspace
        assert (workspace._keys, workspace._rows) == (keys, rows)


def test_one_large_step_leaves_little_behind() -> None:
    """NumPy reports to tracemalloc what it allocates."""
    reserved(20_000_000, 4 * MB)
    assert tracemalloc.get_traced_memory()[1] > 300 * MB
    assert tracemalloc.get_traced_memory()[0] < MB


def test_whoever_launches_meanwhile_has_memory_of_its_own() -> None:
    """A signal's handler, or another thread."""
    first, second = borrow(Workspace), borrow(Workspace)
    assert first is not second
    first.give_back()
    assert borrow(Workspace) is first

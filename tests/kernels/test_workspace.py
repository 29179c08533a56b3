"""Memory that kernels keep between steps: enough that most steps allocate nothing, and no more."""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Iterator

import pytest

from rowstep._kernels import workspace as kept_memory
from rowstep._kernels.workspace import Keys, Workspace

MB = 1 << 20
FLOAT = "float32"


@pytest.fixture(autouse=True)
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


def kept() -> int:
    """Bytes allocated since the test began and not given back; NumPy reports its own."""
    return tracemalloc.get_traced_memory()[0]


def keys(workspace: Workspace, count: int) -> Keys:
    """The larger of what a step of so many ids works with."""
    return workspace.keys(count + 2)


def test_a_step_like_the_last_allocates_nothing() -> None:
    workspace = Workspace()
    assert keys(workspace, 5000) is keys(workspace, 5000)
    assert keys(workspace, 5000) is keys(workspace, 64)
    for columns in (16, 32):
        assert workspace.totals(2, columns, FLOAT) is workspace.totals(2, columns, FLOAT)


def test_tables_of_many_widths_and_one_large_step_leave_little_behind() -> None:
    workspace = Workspace()
    for columns in range(1, 3000, 7):
        assert workspace.totals(4, columns, FLOAT).shape == (4, columns)
    assert workspace.totals(8, 4 * MB, FLOAT).nbytes == 128 * MB
    assert keys(workspace, 20_000_000).size >= 20_000_002
    assert kept() < 2 * MB


def test_a_thread_that_ends_gives_its_memory_back() -> None:
    def work() -> None:
        keys(kept_memory.workspace, 1_000_000)
        kept_memory.workspace.totals(2, 10_000, FLOAT)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert kept() < MB

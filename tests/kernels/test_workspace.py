"""Memory that kernels keep between steps: enough that steps allocate nothing, no more than recent steps needed."""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import Parameter

from rowstep import SparseAdam
from rowstep._kernels import update
from rowstep._kernels import workspace as kept_memory
from rowstep._kernels.workspace import Keys, Workspace
from tests.helpers.gradients import rows_of, same_bits, step_with, table

MB = 1 << 20
FLOAT = np.dtype(np.float32)


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


def test_tables_of_many_widths_leave_little_behind() -> None:
    workspace = Workspace()
    for columns in range(1, 3000):
        for parts in (1, 2, 4, 8):
            assert workspace.totals(parts, columns, FLOAT).shape == (parts, columns)
    assert kept() < 2 * MB


def test_one_wide_table_leaves_nothing_behind() -> None:
    workspace = Workspace()
    assert workspace.totals(8, 4 * MB, FLOAT).nbytes == 128 * MB
    assert kept() < MB


def test_one_large_step_leaves_nothing_behind() -> None:
    workspace = Workspace()
    assert keys(workspace, 20_000_000).size >= 20_000_002
    assert kept() < MB


def test_large_steps_that_come_again_keep_their_memory() -> None:
    workspace = Workspace()
    keys(workspace, 5_000_000)
    second = keys(workspace, 5_100_000)
    for _ in range(5):
        for count in (5_000_000, 5_100_000, *[100] * 26):
            assert keys(workspace, count) is second


def test_memory_for_large_steps_is_given_back_when_they_come_no_more() -> None:
    workspace = Workspace()
    for _ in range(2):
        keys(workspace, 5_000_000)
    assert kept() > 70 * MB
    for _ in range(kept_memory._PATIENCE):
        keys(workspace, 1_000_000)
    assert kept() < MB
    assert keys(workspace, 64) is keys(workspace, 64)


def test_a_thread_that_ends_gives_its_memory_back() -> None:
    def work() -> None:
        keys(kept_memory.workspace, 1_000_000)
        kept_memory.workspace.totals(2, 10_000, FLOAT)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert kept() < MB


def test_a_step_that_interrupts_another_one_on_its_way_to_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a signal handler may: compiling takes seconds, and the handler runs in the same thread."""
    monkeypatch.setenv("ROWSTEP_BACKEND", "numba")
    large, small = table(1000, 4), table(10, 4)
    expected = Parameter(large.detach().clone())
    gradient = rows_of(large, torch.arange(1000))
    step_with(SparseAdam([expected]), expected, gradient)
    part_kernel = update.update.part_kernel

    def interrupted(*arguments: Any) -> None:
        monkeypatch.setattr(update.update, "part_kernel", part_kernel)
        step_with(SparseAdam([small]), small, rows_of(small, [1, 9]))
        part_kernel(*arguments)

    monkeypatch.setattr(update.update, "part_kernel", interrupted)
    step_with(SparseAdam([large]), large, gradient)
    assert same_bits(large, expected)

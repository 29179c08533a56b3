"""What a step finds wrong without waiting for the device: nothing moves, and the next step says so."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from rowstep import DeferredAdam, SparseAdam
from tests.helpers import interpreter as interpreter  # skips, without Triton
from tests.helpers.gradients import Snapshot, rows_of, sparse, step_with, table

from rowstep._backends import triton as backend  # isort: skip
from rowstep._backends.reports import Report  # isort: skip


def naming(param: Tensor, *ids: int) -> Tensor:
    return sparse([ids], torch.ones(len(ids), param.shape[1]), param.shape, checked=False)


@pytest.fixture
def tables() -> tuple[SparseAdam, list[Parameter]]:
    params = [table(5, 2), table(7, 2)]
    optimizer = SparseAdam([("users", params[0]), ("items", params[1])], lr=0.1)
    return optimizer, params


@pytest.mark.parametrize("is_new", [True, False])
@pytest.mark.parametrize(("ids", "named"), [((1, 5, 2), 5), ((-1, 0), -1), ((2**62,), 2**62), ((-(2**63),), -(2**63))])
def test_an_id_outside_of_its_table_moves_nothing_and_is_raised_by_the_next_step(
    tables: Any, ids: tuple[int, ...], named: int, is_new: bool
) -> None:
    optimizer, (users, items) = tables
    if not is_new:
        step_with(optimizer, users, rows_of(users, [0]))
    before = users.detach().clone(), items.detach().clone()
    items.grad = rows_of(items, [6])
    step_with(optimizer, users, naming(users, *ids))
    assert torch.equal(users, before[0])
    assert (items != before[1]).any()  # all other tables have stepped
    assert int(optimizer.state[users]["step"]) == 2 - is_new
    moved = items.detach().clone()
    users.grad = rows_of(users, [1])
    with pytest.raises(IndexError, match=rf"'users'.*earlier step the gradient has index {named} .*0 <= index < 5"):
        optimizer.step()
    assert torch.equal(users, before[0])
    assert torch.equal(items, moved)
    optimizer.step()  # it has been said, and the run may go on
    assert (users != before[0]).any(1).tolist() == [False, True, False, False, False]


def test_state_dict_raises_it_too(tables: Any) -> None:
    optimizer, (users, _) = tables
    step_with(optimizer, users, naming(users, 9))
    with pytest.raises(IndexError, match=r"'users'.*index 9"):
        optimizer.state_dict()
    optimizer.state_dict()


def test_a_report_outlives_the_prepared_table(tables: Any) -> None:
    optimizer, (users, _) = tables
    step_with(optimizer, users, naming(users, 9))
    optimizer.state[users]["exp_avg"] = optimizer.state[users]["exp_avg"].clone()  # so the table is prepared anew
    with pytest.raises(IndexError, match=r"'users'.*index 9"):
        step_with(optimizer, users, rows_of(users, [0]))


def test_memory_that_kernels_may_write_to_is_freed_when_somebody_has_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    devices, done = [torch.device("cuda", 0), torch.device("cuda", 1)], []
    reports = [Report(), Report()]
    for report in reports:
        report.move_to(torch.device("cpu"))  # on which there is no pinned memory
    kept = weakref.ref(reports[0].outside)
    for report in reports:
        for device in devices:
            report.move_to(device)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: done.append((device.index, kept() is not None)))
    del reports[0], report
    gc.collect()
    assert kept() is not None
    assert not done  # a finalizer does not wait
    reports[0].wait()
    assert done == [(1, True), (0, True)]
    assert kept() is None


def test_a_table_that_moves_has_its_rows_counted_where_it_is(tables: Any) -> None:
    optimizer, (users, _) = tables
    step_with(optimizer, users, naming(users, 9))
    known = optimizer._tables[id(users)]
    report, before = known.report, known.report.skipped(3)
    there = torch.device("meta")
    state = {name: torch.as_tensor(value).to(there) for name, value in optimizer.state[users].items()}
    torch.utils.swap_tensors(users, Parameter(users.detach().to(there)))  # type: ignore[no-untyped-call]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "runs_on", lambda device: True)
        moved = optimizer._table_of(users, state, known.spec)
    assert moved.report.skipped(3).device == there
    assert moved.report is report  # what was found where it lay before
    assert not report.is_empty
    report.move_to(before.device)
    assert report.skipped(3) is before


@pytest.fixture
def begin_capture(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A function that begins to capture a graph."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: backend._DEVICE == "cuda")
    return lambda: monkeypatch.setattr(backend, "_DEVICE", "cuda")


class OnGPU(Parameter):
    is_cuda = True


@pytest.mark.parametrize("is_dense", [False, True])
def test_a_step_in_a_cuda_graph_is_refused_with_nothing_changed(
    is_dense: bool, begin_capture: Callable[[], None]
) -> None:
    param = OnGPU(torch.randn(5, 2))
    optimizer = SparseAdam([param], lr=0.1)
    grad = torch.ones(5, 2) if is_dense else rows_of(param, [0])
    step_with(optimizer, param, grad)
    before = Snapshot(optimizer)
    begin_capture()
    with pytest.raises(RuntimeError, match="CUDA graph"):
        step_with(optimizer, param, grad)
    param.grad = None
    before.assert_unchanged()


def test_a_read_of_a_deferred_table_in_a_cuda_graph_is_refused_with_nothing_changed(
    begin_capture: Callable[[], None],
) -> None:
    embedding = torch.nn.Embedding(5, 2, sparse=True)
    optimizer = DeferredAdam(embedding.parameters())
    for ids in ([0, 1], [2]):
        optimizer.zero_grad()
        embedding(torch.tensor(ids)).sum().backward()
        optimizer.step()
    before = Snapshot(optimizer)
    begin_capture()
    for read in (
        lambda: embedding(torch.tensor([0])),
        lambda: embedding.weight.sum(),
        lambda: optimizer.catch_up(embedding.weight, torch.tensor([1])),
        optimizer.flush,
    ):
        with pytest.raises(RuntimeError, match=r"CUDA graph.*reads of a deferred table outside"):
            read()
    before.assert_unchanged()


def test_skipped_rows_are_counted_over_steps_and_tables() -> None:
    params = [table(5, 2), table(7, 2)]
    first_rows = [param.detach()[0].clone() for param in params]
    optimizer = SparseAdam(params, nonfinite="skip")
    for count in (3, 70):  # more programs than before
        for param in params:
            values = torch.ones(count, 2)
            values[0] = torch.nan
            param.grad = sparse([[0] + [1] * (count - 1)], values, param.shape)
        optimizer.step()
    assert optimizer.skipped_rows == 4
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    assert optimizer.skipped_rows == 6
    assert all(torch.equal(param[0], row) for param, row in zip(params, first_rows, strict=True))

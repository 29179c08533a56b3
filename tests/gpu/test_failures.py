"""A kernel that cannot be compiled or loaded is an error before anything is counted or written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import Parameter

from rowstep import DeferredAdam, SparseAdam, clip_grad_norm_
from tests.helpers.deferred_cases import in_memory
from tests.helpers.gradients import Snapshot, rows_of, table
from tests.helpers.interpreter import interpreter


def refuse(monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    """From now on this kernel does not compile for float64."""
    run = interpreter.InterpretedFunction.run

    def refusing(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.__name__ == kernel and str(kwargs["N"]) == "fp64":
            raise RuntimeError(f"{kernel} does not compile")
        return run(self, *args, **kwargs)

    monkeypatch.setattr(interpreter.InterpretedFunction, "run", refusing)


def tables(count: int) -> list[Parameter]:
    """Three tables with gradients, of which the second is of another dtype."""
    params = [table(5, 2, dtype=dtype) for dtype in (torch.float32, torch.float64, torch.float32)]
    for param in params:
        param.grad = rows_of(param, torch.randint(5, (count,)))
    return params


@pytest.mark.parametrize(("kernel", "count"), [("step_rows", 4), ("sum_chunks", 100)])
def test_a_step_moves_no_table(kernel: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = SparseAdam(tables(count))
    optimizer.step()
    before = Snapshot(optimizer)
    refuse(monkeypatch, kernel)
    with pytest.raises(RuntimeError, match="does not compile"):
        optimizer.step()
    before.assert_unchanged()


def test_memory_that_is_not_there_is_missed_before_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = SparseAdam(tables(4), nonfinite="skip")
    optimizer.step()
    before = Snapshot(optimizer)
    report = next(known.report for known in optimizer._tables.values() if known.dtypes[0] is torch.float64)

    def exhausted(count: int) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(report, "skipped", exhausted)
    with pytest.raises(torch.OutOfMemoryError):
        optimizer.step()
    before.assert_unchanged()


def test_what_is_done_right_behind_a_deferred_step_is_compiled_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    params = tables(4)
    before = [in_memory(param).clone() for param in params]
    optimizer = DeferredAdam(params)
    refuse(monkeypatch, "catch_up_rows")
    with pytest.raises(RuntimeError, match="does not compile"):
        optimizer.step()
    assert all(torch.equal(in_memory(param), rows) for param, rows in zip(params, before, strict=True))
    assert [int(optimizer.state[param]["step"]) for param in params] == [0, 0, 0]


def test_a_norm_leaves_the_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    params = tables(4)
    before = [(param.grad, param.grad.to_dense()) for param in params if param.grad is not None]
    refuse(monkeypatch, "norm_rows")
    with pytest.raises(RuntimeError, match="does not compile"):
        clip_grad_norm_(params, 0.1)
    assert all(torch.equal(grad.to_dense(), values) for grad, values in before)

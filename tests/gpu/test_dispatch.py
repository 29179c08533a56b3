"""A step dispatches nothing that waits for the device, and launches at most two kernels per table beside the sort."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from rowstep import DeferredAdamW, SparseAdam
from rowstep._table import Table
from tests.helpers.gradients import rows_of, table
from tests.helpers.interpreter import interpreter as interpreter

# Whatever brings numbers to the host, or has a size that only the device knows.
WAITING = ("item", "_local_scalar_dense", "nonzero", "unique", "_unique2", "unique_dim", "masked_select", "equal",
           "is_nonzero", "_to_cpu", "_coalesce", "coalesce", "bincount", "repeat_interleave", "histc")  # fmt: skip


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The operations that are dispatched, by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []
        self.launches: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name().removeprefix("aten::").split(".")[0])
        return func(*args, **(kwargs or {}))


@pytest.fixture
def operations(monkeypatch: pytest.MonkeyPatch) -> Operations:
    seen, launch = Operations(), interpreter.GridExecutor.__call__

    def launched(self: Any, *args: Any, **kwargs: Any) -> None:
        seen.launches.append(self.fn.__name__)
        with _disable_current_modes():  # what the interpreter itself does is no part of a step
            launch(self, *args, **kwargs)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launched)
    return seen


@pytest.fixture(params=[True, False])
def on_a_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Only tables on the CPU take the short way to the rows of a gradient."""
    if request.param:
        monkeypatch.setattr(Table, "rows_of", lambda *_: None)
    return bool(request.param)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"second_moment": "row", "betas": (0.0, 0.9), "state_dtype": torch.bfloat16},
    {"amsgrad": True, "bias_correction": "row", "nonfinite": "skip", "weight_decay": 0.1},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("count", [5, 100])
def test_a_step_sorts_launches_and_waits_for_nothing(
    operations: Operations, options: dict[str, Any], count: int, on_a_gpu: bool
) -> None:
    params = [table(6, 2), table(8, 3)]
    optimizer = SparseAdam(params, **options)
    for _ in range(2):  # the first makes the state
        operations.names.clear()
        operations.launches.clear()
        for param in params:
            param.grad = rows_of(param, torch.randint(len(param), (count,)))
        with operations:
            optimizer.step()
        assert not set(operations.names) & set(WAITING), operations.names
        assert operations.launches == (["step_rows"] if count < 64 else ["sum_chunks", "step_rows"]) * 2
    views = {"sparse_dim", "_indices", "_values", "detach", "view", *(("select",) if on_a_gpu else ())}
    assert set(operations.names) <= {*views, "sort", "empty"}
    assert operations.names.count("sort") == 2


def test_catching_up_sends_the_window_once_and_waits_for_nothing(operations: Operations, on_a_gpu: bool) -> None:
    params = [table(6, 2), table(8, 3)]
    optimizer = DeferredAdamW(params)
    for param in params:
        param.grad = rows_of(param, [0, 1])
    optimizer.step()
    for _ in range(3):
        operations.names.clear()
        operations.launches.clear()
        grads = [rows_of(param, torch.randint(len(param), (5,))) for param in params]
        ids = [grad._indices()[0] for grad in grads]
        with operations:
            for param, some in zip(params, ids, strict=True):
                optimizer.catch_up(param, some)
        names = list(operations.names)
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        with operations:
            optimizer.step()
        assert not set(operations.names) & set(WAITING), operations.names
    assert operations.launches == ["catch_up_rows"] * 2 + ["step_rows"] * 2
    assert names.count("sort") == 2
    assert names.count("clone") == 2  # on the CPU it stands for what is sent: the window, and what is new in the ring

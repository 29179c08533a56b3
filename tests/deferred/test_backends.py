"""The kernels compute what the reference says, and the same bits for any number of threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rowstep import DeferredAdamW
from rowstep._kernels.pool import PARALLEL_FROM_BYTES
from tests.helpers.deferred_cases import step_caught_up, zipf
from tests.helpers.gradients import copy_of, rows_of, same_bits, table


def results(
    backend: str, threads: int, start: Tensor, gradients: list[Tensor], options: dict[str, Any]
) -> dict[str, Tensor]:
    """The flushed weights and moments after steps with these gradients."""
    torch.set_num_threads(threads)
    param = copy_of(start)
    optimizer = DeferredAdamW([param], lr=0.01, **options)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("ROWSTEP_BACKEND", backend)
        for gradient in gradients:
            step_caught_up(optimizer, param, gradient)
        optimizer.flush()
    return {"weights": param.detach(), **optimizer.state[param]}


@pytest.mark.parametrize("scale", [1.0, 1e-9])
def test_any_number_of_threads_gives_the_same_bits(scale: float) -> None:
    """Catching up by ids, flushing a range, and the step itself, each with half a megabyte and more to do."""
    rows, columns, count = 5000, 33, 4000
    start = table(rows, columns)
    count = PARALLEL_FROM_BYTES // (columns * 4) + 100
    gradients = [rows_of(start, zipf(rows, count), scale * torch.randn(count, columns)) for _ in range(4)]
    one = results("numba", 1, start, gradients, {})
    for threads in (2, 3):
        other = results("numba", threads, start, gradients, {})
        for key, value in one.items():
            assert same_bits(other[key], value), key


def test_the_backend_may_change_in_the_middle_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits is the same for both."""
    start = table(30, 3, dtype=torch.float64)
    gradients = [rows_of(start, zipf(30, 3)) for _ in range(40)]
    expected = results("numba", 1, start, gradients, {})["weights"]
    param = copy_of(start)
    optimizer = DeferredAdamW([param], lr=0.01)
    for number, gradient in enumerate(gradients):
        monkeypatch.setenv("ROWSTEP_BACKEND", "reference" if number % 7 < 3 else "numba")
        step_caught_up(optimizer, param, gradient)
    optimizer.flush()
    torch.testing.assert_close(param.detach(), expected, rtol=0, atol=1e-14)

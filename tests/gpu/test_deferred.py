"""The kernel that brings rows up to date computes what the reference says, and a stale row is reported."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rowstep import DeferredAdam, DeferredAdamW, StaleRowsError
from tests.helpers import interpreter as interpreter  # skips, without Triton
from tests.helpers.deferred_cases import in_memory, step_caught_up
from tests.helpers.gradients import copy_of, rows_of, step_with, table
from tests.helpers.interpreter import recorded_writes

OPTIONS: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.0, "betas": (0.8, 0.9)},
    {"amsgrad": True, "eps": 1e-3},
    {"second_moment": "row"},
    {"second_moment": "row", "betas": (0.0, 0.9)},
]


def run(backend: str, start: Tensor, grads: list[Tensor], **options: Any) -> dict[str, Tensor]:
    """The flushed weights and moments after steps with these gradients."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("ROWSTEP_BACKEND", backend)
        param = copy_of(start)
        optimizer = DeferredAdamW([param], lr=0.01, **{"weight_decay": 0.5} | options)
        for number, grad in enumerate(grads):
            optimizer.param_groups[0]["lr"] = 0.01 / (1 + number % 5)
            step_caught_up(optimizer, param, grad)
        optimizer.flush()
    return {"weights": param.detach(), **optimizer.state[param]}


@pytest.mark.parametrize(("dtype", "bar"), [(torch.float64, 1e-12), (torch.float32, 2e-6)], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("scale", [1.0, 1e-9])
def test_every_option_agrees_with_the_reference_over_50_steps(
    options: dict[str, Any], dtype: torch.dtype, bar: float, scale: float
) -> None:
    """With small gradients the series is not good enough, and the terms are added one by one."""
    if scale < 1 and dtype is torch.float32:
        bar = 2e-5  # of a weight's own move: m is divided by a root that is all rounding
    start = table(7, 3, dtype=dtype)
    grads = [rows_of(start, (torch.rand(3) ** 2 * 7).long(), scale * torch.randn(3, 3)) for _ in range(50)]
    ours, theirs = run("triton", start, grads, **options), run("reference", start, grads, **options)
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, rtol=bar, atol=bar * float(value.abs().max()), msg=key)


def test_rows_that_wait_longer_than_the_window() -> None:
    """Their coefficients are frozen, and the ring on the device has come around."""
    start = table(3, 2, dtype=torch.float64)
    options = {"betas": (0.5, 0.9), "weight_decay": 0.5}
    grads = [rows_of(start, [0, 1, 2]), *(rows_of(start, [0]) for _ in range(150))]
    ours, theirs = run("triton", start, grads, **options), run("reference", start, grads, **options)
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-12, atol=1e-15)


def test_more_rows_than_one_launch_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    from rowstep._backends import triton as backend

    start = table(9, 2, dtype=torch.float64)
    grads = [rows_of(start, ids) for ids in ([0, 1], [5, 5, 5, 2, 5], [0], [8, 3])]
    monkeypatch.setattr(backend, "_MOST_PROGRAMS", 4)
    ours, theirs = run("triton", start, grads), run("reference", start, grads)
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("options", [{}, {"second_moment": "row"}, {"stochastic_rounding": True}], ids=str)
def test_16_bits_are_rounded_by_the_bits_of_the_reference(options: dict[str, Any]) -> None:
    start = table(6, 5, dtype=torch.bfloat16)
    grads = [rows_of(start, torch.randint(6, (3,))) for _ in range(10)]
    options = {"state_dtype": torch.bfloat16, "seed": 3} | options
    ours, theirs = run("triton", start, grads, **options), run("reference", start, grads, **options)
    for key, value in theirs.items():
        if value.dtype is torch.bfloat16:  # now and then float32's own rounding falls on another neighbour
            assert (ours[key] == value).float().mean() > 0.9, key


def test_lookups_catch_up_and_wide_rows_do() -> None:
    results = []
    for backend in ("triton", "reference"):
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("ROWSTEP_BACKEND", backend)
            torch.manual_seed(0)
            model = torch.nn.Embedding(5, 1100, sparse=True, dtype=torch.float64)
            optimizer = DeferredAdam(model.parameters(), lr=0.01)
            for ids in ([0, 1, 2, 3], [1, 1], [1, 4], [0, 3, 0]):
                optimizer.zero_grad()
                model(torch.tensor(ids)).square().sum().backward()
                optimizer.step()
            results.append(in_memory(model.weight))
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-14)


def test_stale_rows_stay_and_are_raised_by_the_next_step() -> None:
    param = table(5, 2)
    optimizer = DeferredAdam([("users", param)], lr=0.1)
    step_caught_up(optimizer, param, rows_of(param, [0, 1, 2]))
    step_caught_up(optimizer, param, rows_of(param, [0]))
    before = in_memory(param)
    step_with(optimizer, param, rows_of(param, [0, 1, 2]))  # of which 1 and 2 have missed a step
    assert (in_memory(param) != before).any(1).tolist() == [True, False, False, False, False]
    optimizer.catch_up(param, torch.arange(5))
    param.grad = rows_of(param, [0])
    with pytest.raises(StaleRowsError, match=r"'users'.*2 rows of an earlier step's gradient were not up to date"):
        optimizer.step()
    optimizer.step()


def test_an_id_outside_of_the_table_is_raised_by_the_next_step() -> None:
    param = table(5, 2)
    optimizer = DeferredAdam([param], lr=0.1)
    step_caught_up(optimizer, param, rows_of(param, [0, 1]))
    optimizer.catch_up(param, torch.tensor([0, 7]))
    with pytest.raises(IndexError, match="index 7"):
        optimizer.state_dict()


def test_programs_write_where_no_other_does() -> None:
    param = table(6, 3)
    optimizer = DeferredAdam([param], lr=0.1)
    step_caught_up(optimizer, param, rows_of(param, list(range(6))))
    for _ in range(3):
        step_caught_up(optimizer, param, rows_of(param, [0]))
    with recorded_writes() as writes:
        optimizer.catch_up(param, torch.tensor([3, 1, 3, 0, 1, 3, 9, -2, 9]))
        optimizer.flush()
    assert not writes.shared
    assert writes.count("catch_up_rows") == 1 + 5 * (1 + 3 * 3)  # a report, and of five rows a note, p, m and v

"""Norms of sparse gradients on the device: those of the reference, and nobody waits for them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rowstep import clip_grad_norm_, clip_grad_value_
from tests.gpu.test_dispatch import WAITING, Operations, operations
from tests.helpers.gradients import rows_of, sparse, table
from tests.helpers.interpreter import recorded_writes

__all__ = ["operations"]  # a fixture


def gradients() -> list[Tensor]:
    """A table's with a run longer than a chunk, a wide one's, one in 16 bits and a dense one."""
    params = [table(9, 3, dtype=torch.float64), table(4, 1100), table(6, 2, dtype=torch.bfloat16), table(5)]
    params[0].grad = rows_of(params[0], torch.cat([torch.full((140,), 4), torch.randint(9, (30,))]))
    for param in params[1:3]:
        param.grad = rows_of(param, [0, 3, 0, 2])
    params[3].grad = torch.randn(5)
    return list(params)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, 0.5, math.inf, 0.0, -1.0])
def test_norms_and_clipped_gradients_agree_with_the_reference(
    norm_type: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for backend in ("triton", "reference"):
        monkeypatch.setenv("ROWSTEP_BACKEND", backend)
        torch.manual_seed(0)
        params = gradients()
        norm = clip_grad_norm_(params, 0.1, norm_type)
        results.append([norm, *(param.grad.to_dense() for param in params if param.grad is not None)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("norm_type", [2.0, 3.0, math.inf])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays(norm_type: float, bad: float) -> None:
    param = table(5, 2)
    param.grad = sparse([[1, 3]], torch.tensor([[1.0, bad], [2.0, 3.0]]), param.shape)
    norm = clip_grad_norm_(param, 1.0, norm_type)
    assert math.isnan(norm) if math.isnan(bad) else norm == math.inf
    with pytest.raises(RuntimeError, match="cannot be clipped"):
        clip_grad_norm_(param, 1.0, norm_type, error_if_nonfinite=True)


def test_nothing_waits_for_the_norm(operations: Operations) -> None:
    params = gradients()
    with operations:
        clip_grad_norm_(params, 0.1)
    assert operations.launches == ["sum_chunks", "norm_rows", "norm_rows", "norm_rows"]
    # On the CPU the factor is read, to do nothing where it is 1: its comparison is the only one.
    waited = [name for name in operations.names if name in WAITING]
    assert waited == ["_local_scalar_dense"]
    assert operations.names[operations.names.index("_local_scalar_dense") - 1] == "eq"


def test_an_id_outside_of_its_table_is_left_to_the_step_unless_sums_are_clamped() -> None:
    param = table(5, 2)
    param.grad = sparse([[7]], torch.ones(1, 2), param.shape, checked=False)
    assert clip_grad_norm_(param, 10.0) == pytest.approx(math.sqrt(2))
    with pytest.raises(IndexError, match="index 7"):
        clip_grad_value_(param, 1.0)


def test_programs_write_where_no_other_does() -> None:
    with recorded_writes() as writes:
        clip_grad_norm_(gradients(), 0.1)
    assert not writes.shared
    assert writes.count("norm_rows") == 170 + 4 + 4

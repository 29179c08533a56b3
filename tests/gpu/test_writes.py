"""No two programs of a launch write the same address. The interpreter runs them one after another and shows no race."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rowstep import SparseAdam
from tests.helpers.gradients import sparse, table
from tests.helpers.interpreter import recorded_writes

OPTIONS: list[dict[str, Any]] = [
    {},
    {"second_moment": "row", "nonfinite": "skip", "bias_correction": "row"},
    {"amsgrad": True, "state_dtype": torch.bfloat16},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("rows", "columns", "count"), [(4, 3, 300), (40, 2, 90), (2, 1100, 140)])
def test_programs_of_a_step_write_where_no_other_does(
    rows: int, columns: int, count: int, options: dict[str, Any]
) -> None:
    param = table(rows, columns)
    optimizer = SparseAdam([param], **options)
    for ids in (torch.randint(rows, (count,)), (torch.rand(count) ** 4 * rows).long(), torch.arange(count) - 1):
        values = torch.randn(count, columns)
        values[::7] = torch.nan
        param.grad = sparse(ids.unsqueeze(0), values, param.shape, checked=False)
        with recorded_writes() as writes:
            try:
                optimizer.step()
            finally:
                assert not writes.shared
        assert writes.count("step_rows") > 0
    assert writes.count("step_rows") == 1  # of the last only the report: it names rows outside of the table


def test_the_recorder_sees_two_programs_that_write_one_address() -> None:
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator]
    def same(place: Any) -> None:
        tl.store(place, 1)

    same.fn.__globals__["tl"] = tl
    with recorded_writes() as writes:
        same[(2,)](torch.zeros(1))
    assert len(writes.shared) == 1

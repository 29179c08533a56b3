"""Ids are grouped before rows step: whatever their order and the table, the occurrences of each come together."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import Parameter

from rowstep import SparseAdam
from tests.helpers.gradients import rows_of, step_with


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    ("rows", "order"),
    [
        *((rows, "random") for rows in (1, 2, 3, 4095, 4096, 4097, 2**16 + 1, 2**24 + 1)),
        *((4097, order) for order in ("ascending", "descending", "one row", "two rows")),
        (2**24, "two rows"),
    ],
)
def test_occurrences_come_together_in_a_table_of_any_size(rows: int, order: str) -> None:
    ids = torch.randint(rows, (3000,))
    if order in ("ascending", "descending"):
        ids = ids.sort(descending=order == "descending").values
    elif order == "one row":
        ids.fill_(rows - 1)
    elif order == "two rows":
        ids = torch.where(ids % 2 == 0, 0, rows - 1)
    values = torch.randint(-50, 50, (3000,)).float()
    param = Parameter(torch.zeros(rows, 1))
    optimizer = SparseAdam([param], betas=(0.0, 0.0))  # the first moment is then the summed gradient
    step_with(optimizer, param, rows_of(param, ids, values))
    expected: dict[int, float] = {}
    for row, value in zip(ids.tolist(), values.tolist(), strict=True):
        expected[row] = expected.get(row, 0.0) + value
    moment = optimizer.state[param]["exp_avg"].flatten()
    assert moment[list(expected)].tolist() == list(expected.values())
    assert math.isclose(moment.sum(dtype=torch.float64).item(), sum(expected.values()))
    assert (moment != 0).sum().item() == sum(value != 0 for value in expected.values())

"""Random tables, gradients and options: the compiled kernels compute what the reference says."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter

from rowstep import SparseAdam
from tests.helpers.gradients import copy_of, entries_of, rows_of, sparse, step_with, table

OPTIONS: list[dict[str, Any]] = [
    {},
    {"lr": 0.1, "betas": (0.5, 0.6), "eps": 1e-2},
    {"maximize": True},
    {"weight_decay": 0.1},
    {"weight_decay": 0.1, "decoupled_weight_decay": True},
    {"amsgrad": True},
    {"bias_correction": "row"},
    {"amsgrad": True, "bias_correction": "row", "nonfinite": "skip", "weight_decay": 0.1, "maximize": True},
]


@dataclass
class Case:
    """A run: what is stepped, and how many entries the gradient of each step has."""

    shape: tuple[int, ...]
    sparse_dim: int
    counts: list[int]
    options: dict[str, Any]
    seed: int

    def build(self) -> tuple[Parameter, list[Tensor]]:
        torch.manual_seed(self.seed)
        param = table(*self.shape)
        return param, [entries_of(param, count, self.sparse_dim) for count in self.counts]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=4)))
    options = draw(st.sampled_from(OPTIONS))
    sparse_dim = 1 if "bias_correction" in options else draw(st.integers(0, len(shape)))
    counts = draw(st.lists(st.integers(0, 40), min_size=1, max_size=4))
    return Case(shape, sparse_dim, counts, options, draw(st.integers(0, 2**31)))


def results(backend: str, start: Parameter, gradients: list[Tensor], options: dict[str, Any]) -> dict[str, Tensor]:
    """Weights and state after steps with these gradients on this backend."""
    param = copy_of(start)
    optimizer = SparseAdam([param], **options)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("ROWSTEP_BACKEND", backend)
        for gradient in gradients:
            step_with(optimizer, param, gradient)
    return {"weights": param.detach()} | {key: torch.as_tensor(value) for key, value in optimizer.state[param].items()}


@given(cases())
def test_numba_equals_the_reference(case: Case) -> None:
    start, gradients = case.build()
    expected = results("reference", start, gradients, case.options)
    actual = results("numba", start, gradients, case.options)
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(actual[key], value, rtol=1e-5, atol=1e-6)


@given(cases(), st.randoms(use_true_random=False))
def test_the_order_of_entries_and_the_split_of_duplicates_do_not_matter(case: Case, random: Any) -> None:
    """For values whose sums are exact: whole numbers."""
    start, gradients = case.build()
    rounded, shuffled = [], []
    for gradient in gradients:
        indices, values = gradient._indices(), (4 * gradient._values()).round()
        order = list(range(len(values)))
        random.shuffle(order)
        part = (values / 2).round()
        twice = torch.cat([indices[:, order], indices], dim=1)
        rounded.append(sparse(indices, values, case.shape))
        shuffled.append(sparse(twice, torch.cat([part[order], values - part]), case.shape))
    for backend in ("reference", "numba"):
        once = results(backend, start, rounded, case.options)
        again = results(backend, start, shuffled, case.options)
        assert all(torch.equal(once[key], again[key]) for key in once)


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

"""Rounding at random: right on average, where it should be, and by the same bits for threads, ranks and restarts."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rowstep import DeferredAdam, DeferredAdamW, SparseAdam
from rowstep._backends.gate import Extent
from rowstep._backends.reference.rounding import Noise, rounded
from rowstep._layout import RowOrder
from rowstep._part import TablePart, extent_of, mark
from rowstep._rules.rounding import step_key
from tests.helpers.gradients import rows_of

HALVES = [torch.bfloat16, torch.float16]


def numbers() -> Tensor:
    """Numbers of every size, most of them between two of 16 bits."""
    sizes = torch.logspace(-44, 38, 400, dtype=torch.float64).float()
    special = torch.tensor([0.0, 1.0, 65504.0, 65510.0, 65519.9, 65520.0, 3.3895e38, 2.0**-14, 2.0**-24, 2.0**-25])
    return torch.cat([sizes, -sizes, special, -special])


@pytest.mark.parametrize("dtype", HALVES)
def test_a_number_becomes_one_of_its_two_neighbours_and_is_right_on_average(dtype: torch.dtype) -> None:
    exact, draws = numbers(), 1 << 12
    info = torch.finfo(dtype)
    bits = torch.arange(draws) * (65536 // draws) + 1  # evenly over all that 16 bits can be
    drawn = rounded(exact.unsqueeze(1).expand(-1, draws), dtype, bits.expand(len(exact), -1)).double()
    nearest = exact.to(dtype)
    up = torch.nextafter(nearest, torch.tensor(torch.inf, dtype=dtype)).double()
    down = torch.nextafter(nearest, torch.tensor(-torch.inf, dtype=dtype)).double()
    assert ((drawn >= down.unsqueeze(1)) & (drawn <= up.unsqueeze(1)) | drawn.isinf()).all()
    finite = exact.abs() <= info.max
    spacing = (up - down) / 2
    error = (drawn.mean(dim=1) - exact.double())[finite].abs()
    assert (error <= spacing[finite] * 2e-3).all()
    assert torch.equal(drawn[~finite, 0], exact[~finite].to(dtype).double())  # as torch rounds them


@pytest.mark.parametrize("dtype", HALVES)
def test_what_is_not_finite_or_needs_no_rounding_stays(dtype: torch.dtype) -> None:
    kept = torch.tensor([0.0, -0.0, 1.0, -2.5, torch.inf, -torch.inf, 2.0**-20, 1000 * 2.0**-24]).repeat(999, 1)
    bits = torch.randint(1 << 32, kept.shape)
    assert torch.equal(rounded(kept, dtype, bits).float(), kept)
    assert rounded(torch.full((1, 9), torch.nan), dtype, bits[:1, :1].expand(1, 9)).isnan().all()
    assert torch.equal(rounded(kept, torch.float32, bits), kept)


def bits_of(seed: int, step: int) -> Tensor:
    noise = Noise(step_key(seed, step), Extent(), torch.arange(300), columns=33)
    return noise._bits(noise._row_keys())


def test_the_bits_of_rows_columns_steps_and_moments_are_independent() -> None:
    drawn = torch.stack([bits_of(3, step) for step in range(20)])
    low, high = (drawn & 0xFFFF).double() / 65536, (drawn >> 16).double() / 65536
    neighbours = [
        (half.narrow(dim, 0, half.shape[dim] - 1), half.narrow(dim, 1, half.shape[dim] - 1))
        for half, dim in itertools.product((low, high), range(3))
    ]
    bound = 6 / drawn.numel() ** 0.5
    for one, other in [(low, high), *neighbours]:
        assert abs(float(((one - 0.5) * (other - 0.5)).mean())) * 12 < bound
    for half in (low, high):
        assert abs(float(half.mean()) - 0.5) < bound
    assert (bits_of(4, 0) == drawn[0]).float().mean() < 1e-3


def run(optimizer: Any, param: nn.Parameter, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(len(param), (40,), generator=generator)
        if isinstance(optimizer, DeferredAdam):
            optimizer.catch_up(param, ids)
        param.grad = rows_of(param, ids, torch.randn(40, param.shape[1], generator=generator))
        optimizer.step()


OPTIONS: dict[str, dict[str, Any]] = {
    "bfloat16": {"state_dtype": torch.bfloat16},
    "float16 and row": {"state_dtype": torch.float16, "second_moment": "row"},
    "maximum": {"state_dtype": torch.bfloat16, "amsgrad": True},
}


@pytest.mark.parametrize("kind", [SparseAdam, DeferredAdamW])
@pytest.mark.parametrize("name", OPTIONS)
def test_kernels_round_as_the_reference_does(kind: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    states = []
    for backend in ("reference", "numba"):
        monkeypatch.setenv("ROWSTEP_BACKEND", backend)
        torch.manual_seed(0)
        param = nn.Parameter(torch.randn(60, 7))
        optimizer = kind([param], lr=0.01, seed=11, **OPTIONS[name])
        run(optimizer, param, range(30))
        states.append(optimizer.state_dict()["state"][0] | {"p": param.detach()})
    one, other = states
    assert one["exp_avg"].dtype == OPTIONS[name]["state_dtype"]
    for key in one:
        if key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
            # What is rounded may differ by float32's own rounding, and then falls on another neighbour now and then.
            assert (one[key] == other[key]).float().mean() > 0.99
        elif key != "step":
            torch.testing.assert_close(one[key], other[key], rtol=1e-2 if kind is DeferredAdamW else 1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", HALVES)
def test_small_updates_of_weights_are_not_lost(dtype: torch.dtype, backend: str) -> None:
    """Of less than a tenth of a unit in the last place each: rounded to the nearest, none would move a weight."""
    steps, lr = (10_000 if backend == "numba" else 1_000), 4e-5
    assert lr < 0.1 * torch.finfo(dtype).eps
    for rounding in (True, False):
        param = nn.Parameter(torch.full((9, 50), 1.9, dtype=dtype))
        start = float(param.detach()[0, 0])
        optimizer = SparseAdam(
            [param], lr=lr, betas=(0.0, 0.0), stochastic_rounding=rounding, second_moment="row"
        )  # fmt: skip
        param.grad = rows_of(param, range(8), 1.0)
        for _ in range(steps):
            optimizer.step()
        moved = start - float(param.detach()[:8].double().mean())
        assert moved == pytest.approx(steps * lr, rel=0.05 * (10_000 / steps) ** 0.5) if rounding else moved == 0
        assert (param[8] == start).all()


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("kind", [SparseAdam, DeferredAdam])
def test_a_small_moment_grows_as_it_should(kind: Any) -> None:
    """v = 1 - 0.999^t, in steps that bfloat16 cannot hold from 0.25 on."""
    param = nn.Parameter(torch.zeros(300, 8))
    optimizer = kind([param], betas=(0.0, 0.999), state_dtype=torch.bfloat16)
    for _ in range(700):
        param.grad = rows_of(param, range(300), 1.0)
        optimizer.step()
    second = optimizer.state_dict()["state"][0]["exp_avg_sq"].double()
    assert float(second.mean()) == pytest.approx(1 - 0.999**700, rel=3e-3)


def test_the_number_of_threads_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROWSTEP_BACKEND", "numba")
    for kind in (SparseAdam, DeferredAdamW):
        results = []
        for threads in (1, 3):
            torch.set_num_threads(threads)
            torch.manual_seed(0)
            param = nn.Parameter(torch.randn(2000, 64).bfloat16())
            optimizer = kind([param], state_dtype=torch.bfloat16, stochastic_rounding=True)
            for _ in range(3):
                ids = torch.randint(2000, (3000,))
                if isinstance(optimizer, DeferredAdamW):
                    optimizer.catch_up(param, ids)
                param.grad = rows_of(param, ids)
                optimizer.step()
            results.append([param.detach(), *optimizer.state_dict()["state"][0].values()])
        assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(*results, strict=True))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("parts", [1, 3])
def test_a_part_of_a_table_is_rounded_as_the_whole_is(parts: int) -> None:
    """By the number of a row in the whole table, wherever it lies."""
    rows = 101
    torch.manual_seed(0)
    whole = nn.Parameter(torch.randn(rows, 5).bfloat16())
    order = RowOrder.spread(rows)
    ids_in_order = order.ids(torch.arange(rows))
    start, values = whole.detach().clone(), torch.randn(rows, 5).bfloat16()
    options: dict[str, Any] = {"lr": 0.01, "state_dtype": torch.bfloat16, "stochastic_rounding": True}
    optimizer = SparseAdam([whole], **options)
    for _ in range(5):
        whole.grad = rows_of(whole, range(rows), values)
        optimizer.step()
    size = -(-rows // parts)
    for first in range(0, rows, size):
        positions = range(first, min(first + size, rows))
        ids = ids_in_order[positions.start : positions.stop]
        part = nn.Parameter(start[ids].clone())
        mark(part, TablePart(order, positions, peers=None))
        assert extent_of(part).rows == rows
        own = SparseAdam([part], **options)
        for _ in range(5):
            part.grad = rows_of(part, range(len(ids)), values[ids])
            own.step()
        assert torch.equal(part, whole[ids])
        assert torch.equal(own.state[part]["exp_avg_sq"], optimizer.state[whole]["exp_avg_sq"][ids])


def test_rows_of_a_part_catch_up_when_those_of_the_whole_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Now and then a row that waits has its turn to catch up, and is rounded then: at the same step for all ranks."""
    monkeypatch.setenv("ROWSTEP_BACKEND", "numba")
    rows, steps = 500, 200
    order, start = RowOrder.spread(rows), torch.randn(rows, 7)
    tables = {}
    for parts in (1, 4):
        size, pieces = rows // parts, []
        for first in range(0, rows, size):
            param = nn.Parameter(start[first : first + size].clone())
            mark(param, TablePart(order, range(first, first + size), peers=None))
            optimizer = DeferredAdamW([param], lr=0.01, state_dtype=torch.bfloat16)
            for step in range(steps):
                generator = torch.Generator().manual_seed(step)
                ids = torch.randperm(rows, generator=generator)[:40]
                values = torch.randn(40, 7, generator=generator)
                own = (ids >= first) & (ids < first + size)
                optimizer.catch_up(param, ids[own] - first)
                param.grad = rows_of(param, ids[own] - first, values[own])
                optimizer.step()
            pieces.append(param.detach().clone())
        tables[parts] = torch.cat(pieces)
    assert torch.equal(tables[1], tables[4])


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("kind", [SparseAdam, DeferredAdamW])
def test_a_run_that_is_resumed_goes_on_with_the_same_bits(kind: Any) -> None:
    for seed, dtype in itertools.product((0, 2**63 - 1), (torch.float32, torch.bfloat16)):
        options: dict[str, Any] = {"state_dtype": torch.bfloat16, "seed": seed, "lr": 0.01}
        if dtype == torch.bfloat16:
            options["stochastic_rounding"] = True
        torch.manual_seed(0)
        param = nn.Parameter(torch.randn(50, 4).to(dtype))
        optimizer = kind([param], **options)
        run(optimizer, param, range(10))
        saved, weights = copy.deepcopy(optimizer.state_dict()), param.detach().clone()
        resumed = nn.Parameter(weights)
        other = kind([resumed], lr=0.5)
        other.load_state_dict(saved)
        assert other.param_groups[0]["seed"] == seed
        assert other.state[resumed]["exp_avg"].dtype == torch.bfloat16
        run(optimizer, param, range(10, 20))
        run(other, resumed, range(10, 20))
        assert torch.equal(param, resumed)

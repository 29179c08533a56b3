"""Rounding at random: right on average, where it should be, and by the same bits for threads and restarts."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rowstep import DeferredAdam, DeferredAdamW, SparseAdam
from tests.helpers.gradients import rows_of

HALVES = [torch.bfloat16, torch.float16]


def numbers() -> Tensor:
    """Numbers of every size, most of them between two of 16 bits."""
    sizes = torch.logspace(-44, 38, 400, dtype=torch.float64).float()
    special = torch.tensor([0.0, 1.0, 65504.0, 65510.0, 65519.9, 65520.0, 3.3895e38, 2.0**-14, 2.0**-24, 2.0**-25])
    return torch.cat([sizes, -sizes, special, -special])


def rounded(values: Tensor, dtype: torch.dtype, *, steps: int = 1, seed: int = 0) -> tuple[Tensor, Tensor]:
    """These gradients as the moments of ``dtype`` hold them: with both betas 0, itself and its square."""
    param = nn.Parameter(torch.zeros(values.shape))
    optimizer = SparseAdam([param], betas=(0.0, 0.0), state_dtype=dtype, seed=seed)
    for _ in range(steps):
        param.grad = rows_of(param, range(len(values)), values)
        optimizer.step()
    return optimizer.state[param]["exp_avg"], optimizer.state[param]["exp_avg_sq"]


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", HALVES)
def test_a_number_becomes_one_of_its_two_neighbours_and_is_right_on_average(dtype: torch.dtype) -> None:
    exact, draws = numbers(), 1 << 12
    drawn = rounded(exact.expand(draws, -1), dtype)[0].double()
    nearest = exact.to(dtype)
    up = torch.nextafter(nearest, torch.tensor(torch.inf, dtype=dtype)).double()
    down = torch.nextafter(nearest, torch.tensor(-torch.inf, dtype=dtype)).double()
    assert ((drawn >= down) & (drawn <= up) | drawn.isinf()).all()
    finite = exact.abs() <= torch.finfo(dtype).max
    error = (drawn.mean(dim=0) - exact.double())[finite].abs()
    assert (error <= (up - down)[finite] * 2 / draws**0.5).all()  # four standard deviations
    assert (drawn[:, ~finite] == exact[~finite].to(dtype).double()).all()  # as torch rounds them


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", HALVES)
def test_what_is_not_finite_or_needs_no_rounding_stays(dtype: torch.dtype) -> None:
    kept = torch.tensor([0.0, 1.0, -2.5, torch.inf, -torch.inf, 2.0**-20, 1000 * 2.0**-24, torch.nan]).repeat(999, 1)
    torch.testing.assert_close(rounded(kept, dtype)[0].float(), kept, rtol=0, atol=0, equal_nan=True)


@pytest.mark.usefixtures("backend")
def test_the_bits_of_rows_columns_steps_seeds_and_moments_are_independent() -> None:
    """Of a third of the way from 1 to its neighbour, the square lies two thirds of the way."""
    unit = torch.finfo(torch.bfloat16).eps
    values = torch.full((300, 33), 1 + unit / 3)
    seen = [rounded(values, torch.bfloat16, steps=steps, seed=3) for steps in (1, 2, 3)]
    first, second = (torch.stack([(moments[which].double() - 1) / unit for moments in seen]) for which in (0, 1))
    other = (rounded(values, torch.bfloat16, seed=4)[0].double() - 1) / unit
    bound = 6 / first[0].numel() ** 0.5
    assert abs(float(first.mean()) - 1 / 3) < bound
    assert abs(float(second.mean()) - 2 / 3) < bound
    pairs = [(half.narrow(d, 0, half.shape[d] - 1), half.narrow(d, 1, half.shape[d] - 1))
             for half, d in itertools.product((first, second), range(3))]  # fmt: skip
    for one, another in [(first, second), (first[0], other), *pairs]:
        assert abs(float(((one - one.mean()) * (another - another.mean())).mean())) < bound / 4


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
    "by row": {"state_dtype": torch.bfloat16, "second_moment": "row"},
    "maximum": {"state_dtype": torch.bfloat16, "amsgrad": True},
}


# Each pair is a kernel to compile, of DeferredAdamW two: what it rounds in a step, SparseAdam rounds by the same lines.
@pytest.mark.parametrize(("kind", "name"), [(SparseAdam, "bfloat16"), *((DeferredAdamW, name) for name in OPTIONS)])
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


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", HALVES)
def test_small_updates_of_weights_are_not_lost(dtype: torch.dtype) -> None:
    """Of less than a tenth of a unit in the last place each: rounded to the nearest, none would move a weight."""
    steps, lr = 300, 4e-5
    assert lr < 0.1 * torch.finfo(dtype).eps
    for options in ({"stochastic_rounding": True, "state_dtype": dtype}, {}):
        param = nn.Parameter(torch.full((9, 400), 1.9, dtype=dtype))
        start = float(param.detach()[0, 0])
        optimizer = SparseAdam([param], lr=lr, betas=(0.0, 0.0), **options)  # type: ignore[arg-type]
        param.grad = rows_of(param, range(8), 1.0)
        for _ in range(steps):
            optimizer.step()
        moved = start - float(param.detach()[:8].double().mean())
        assert moved == pytest.approx(steps * lr if options else 0.0, rel=0.05)
        assert (param[8] == start).all()


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(("kind", "is_sparse"), [(SparseAdam, True), (SparseAdam, False), (DeferredAdam, True)])
def test_moments_of_rounded_weights_are_rounded_at_random_too(kind: Any, is_sparse: bool) -> None:
    """Rounded to the nearest, this second moment would stay at 0.5, and that of a row which waits would not decay."""
    param, steps, beta2 = nn.Parameter(torch.zeros(60, 8, dtype=torch.bfloat16)), 300, 0.997
    optimizer = kind([param], betas=(0.9, beta2), stochastic_rounding=True)
    for step in range(steps):
        rows = range(60 if step == 0 else 40)
        param.grad = rows_of(param, rows, 1.0) if is_sparse else torch.ones_like(param)
        optimizer.step()
        if kind is DeferredAdam:
            optimizer.flush()
    first, second = optimizer.state[param]["exp_avg"], optimizer.state[param]["exp_avg_sq"]
    assert (first.dtype, second.dtype) == (torch.bfloat16, torch.bfloat16)
    expected = {"m": (first[:40], 1), "v": (second[:40], 1 - beta2**steps), "p": (param.detach()[:40], -1e-3 * steps)}
    if kind is DeferredAdam:
        expected["v of rows that waited"] = second[40:], (1 - beta2) * beta2 ** (steps - 1)
    for name, (drawn, mean) in expected.items():
        assert float(drawn.double().mean()) == pytest.approx(mean, rel=0.03), name


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

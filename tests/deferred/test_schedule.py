"""The coefficients of the deferred steps, against sums with fifty digits, for any gap and at the end of a long run."""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal, localcontext
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from rowstep._schedule import EBAR, M0, M2, M3, M4, M5, SAFE, Schedule, check_betas, window_length
from tests.helpers.deferred_cases import LONG, SCHEDULES

BETAS = [(0.9, 0.999), (0.9, 0.95), (0.5, 0.99), (0.0, 0.99), (0.9, 0.9)]

# What a double-precision sum of some hundred terms may be off by, and the n-th power of a rounded number.
ROUNDING = 2e-14
UNIT = 2.3e-16


class Ledger:
    """A schedule, and beside it every step that was taken, so that its sums can be had term by term."""

    def __init__(
        self, betas: tuple[float, float], eps: float = 1e-8, *, amsgrad: bool = False, step: int = 0, **options: Any
    ) -> None:
        self.schedule = Schedule(betas, eps, amsgrad=amsgrad, step=step, **({"tolerance": 1e-15} | options))
        self.betas, self.eps, self.amsgrad, self.begin = betas, eps, amsgrad, step
        self.rates: list[float] = []
        self.kept: list[float] = []

    def advance(self, lr: float, weight_decay: float = 0.0) -> None:
        self.schedule.advance(lr, weight_decay)
        self.rates.append(lr)
        self.kept.append(1 - lr * weight_decay)

    def run(self, steps: int, schedule: Callable[[int], float] = SCHEDULES["constant"], decay: float = 0.0) -> None:
        for t in range(steps):
            self.advance(schedule(t), decay)

    def since(self, *gaps: int) -> Any:
        return np.array([self.schedule.step - gap for gap in gaps])

    def left(self, gap: int) -> Decimal:
        """What weight decay leaves of a weight over the last ``gap`` steps."""
        with localcontext(prec=50):
            return math.prod((Decimal(kept) for kept in self.kept[len(self.kept) - gap :]), start=Decimal(1))

    def terms(self, gap: int, count: int = 1 << 30) -> list[tuple[Decimal, Decimal]]:
        """(w, e) of the first ``count`` of the last ``gap`` steps, newest first, by rowstep._deferred's equations."""
        beta1, beta2 = self.betas
        count = min(gap, count)
        found: list[tuple[Decimal, Decimal]] = []
        with localcontext(prec=50):
            growth = Decimal(1) if self.amsgrad else 1 / Decimal(beta2).sqrt()
            left = self.left(gap - count)
            for j in range(count, 0, -1):
                position = len(self.rates) - gap + j - 1
                t = self.begin + position + 1
                root = math.sqrt(1 - beta2**t)
                rate = Decimal(self.rates[position] * root / (1 - beta1**t))
                found.append((rate * left * (Decimal(beta1) * growth) ** j, Decimal(self.eps * root) * growth**j))
                left *= Decimal(self.kept[position])
        return found


def direct_sum(terms: list[tuple[Decimal, Decimal]], v: float) -> Decimal:
    with localcontext(prec=50):
        return sum((w / (Decimal(v).sqrt() + e) for w, e in terms), start=Decimal(0))


def series(row: Any, v: Any) -> Any:
    """The sum as the kernels take it from a row of coefficients."""
    inverse = 1 / (np.sqrt(v) + row[EBAR])
    theta = row[EBAR] * inverse
    return inverse * (row[M0] + theta**2 * (row[M2] - theta * (row[M3] - theta * (row[M4] - theta * row[M5]))))


def relative_error(value: float, exact: Decimal) -> float:
    return abs(float((Decimal(float(value)) - exact) / exact)) if exact else abs(float(value))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("decay", [0.0, 1.0])
@pytest.mark.parametrize("betas", BETAS, ids=str)
def test_coefficients_are_the_sums_over_the_terms(betas: tuple[float, float], decay: float, schedule: str) -> None:
    ledger = Ledger(betas)
    ledger.run(520, SCHEDULES[schedule], decay)
    length = ledger.schedule.window_length
    gaps = sorted({gap for gap in (1, 2, 7, 56, 110, length) if gap <= min(length, 520)})
    table, kept, aged = ledger.schedule.coefficients(ledger.since(*gaps))
    assert (aged == 1).all()
    for gap, row, left in zip(gaps, table, kept, strict=True):
        terms = ledger.terms(gap)
        assert abs(left - float(ledger.left(gap))) <= ROUNDING
        rounding = ROUNDING + gap * UNIT
        with localcontext(prec=50):
            total = sum((w for w, _ in terms), start=Decimal(0))
            assert relative_error(row[M0], total) <= rounding
            if not total:
                assert not row[[M2, M3, M4, M5]].any()
                continue
            mean = sum((w * e for w, e in terms), start=Decimal(0)) / total
            assert relative_error(row[EBAR], mean) <= rounding
            for n, column in ((2, M2), (3, M3), (4, M4), (5, M5)):
                exact = sum((w * (e / mean - 1) ** n for w, e in terms), start=Decimal(0))
                scale = sum((w * (e / mean + 1) ** n for w, e in terms), start=Decimal(0))
                assert abs(float(row[column]) - float(exact)) <= n * rounding * float(scale)


@pytest.mark.parametrize("tolerance", [1e-15, 1e-6])
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("eps", [1e-8, 1e-3])
@pytest.mark.parametrize("betas", BETAS, ids=str)
def test_where_the_bound_says_safe_the_series_is(
    betas: tuple[float, float], eps: float, amsgrad: bool, tolerance: float
) -> None:
    ledger = Ledger(betas, eps, amsgrad=amsgrad, tolerance=tolerance)
    for t in (1, 3, 40, 400):
        ledger.run(t - len(ledger.rates), SCHEDULES["warm-up"], 1.0)
        for gap in (1, 2, 40, 300):
            if gap > min(t, ledger.schedule.window_length):
                continue
            row = ledger.schedule.coefficients(ledger.since(gap))[0][0]
            terms = ledger.terms(gap)
            for v in (row[SAFE], 1.01 * row[SAFE], 0.0, 1e-30, eps**2, 1.0):
                if v >= row[SAFE]:
                    assert relative_error(series(row, v), direct_sum(terms, v)) <= tolerance + ROUNDING


def test_the_series_is_good_for_every_number_in_the_usual_case() -> None:
    ledger = Ledger((0.9, 0.999), tolerance=1e-9)
    ledger.run(2000)
    assert not ledger.schedule.window[1:200, SAFE].any()


@pytest.mark.parametrize("decay", [0.0, 1.0])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("betas", BETAS[1:3], ids=str)
def test_terms_one_by_one(betas: tuple[float, float], schedule: str, decay: float) -> None:
    ledger = Ledger(betas)
    ledger.run(600, SCHEDULES[schedule], decay)
    for gap in (1, 2, 50, 600):
        weights, es = ledger.schedule.terms(ledger.schedule.step - gap)
        exact = ledger.terms(gap)[::-1][: ledger.schedule.window_length]
        assert len(weights) == len(es) == len(exact)
        for weight, e, (exact_weight, exact_e) in zip(weights, es, exact, strict=True):
            assert relative_error(weight, exact_weight) <= ROUNDING + gap * UNIT
            assert relative_error(e, exact_e) <= ROUNDING + gap * UNIT


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("decay", [0.0, 1.0])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_frozen_entries_are_the_sums_of_their_first_steps(schedule: str, decay: float, amsgrad: bool) -> None:
    ledger = Ledger((0.5, 0.99), amsgrad=amsgrad)
    ledger.run(700, SCHEDULES[schedule], decay)
    length = ledger.schedule.window_length
    gaps = [length + 1, 2 * length, 333, 700]
    table, kept, aged = ledger.schedule.coefficients(ledger.since(*gaps))
    for gap, row, left, age in zip(gaps, table, kept, aged, strict=True):
        terms = ledger.terms(gap, length)
        assert abs(left - float(ledger.left(gap))) <= ROUNDING
        for v in (row[SAFE], 1e-6, 1.0):
            exact = direct_sum(terms, v)
            assert abs(float(age * series(row, v)) - float(exact)) * math.sqrt(v) <= ROUNDING
            # What is cut off is nothing, in units of a weight: the first moment is at most about sqrt(v / (1 - beta2)).
            assert abs(float(direct_sum(ledger.terms(gap), v) - exact)) * math.sqrt(v) <= 1e-16


@pytest.mark.parametrize("step", [0, 7, 100_000, 1_200_000])
def test_a_schedule_may_begin_at_any_step(step: int) -> None:
    ledger = Ledger((0.9, 0.999), step=step)
    ledger.run(40, decay=0.1)
    table, _, _ = ledger.schedule.coefficients(ledger.since(1, 17, 40))
    for gap, row in zip((1, 17, 40), table, strict=True):
        assert relative_error(series(row, 1e-4), direct_sum(ledger.terms(gap), 1e-4)) <= ROUNDING


@pytest.mark.parametrize("decay", [0.01, 50.0])
def test_a_long_run_does_not_drift_and_does_not_grow(decay: float) -> None:
    """1.2 million steps if there is time; 20,000 go round the ring of 16,384 steps once."""
    ledger = Ledger((0.5, 0.99))
    schedule, memory = ledger.schedule, footprint(ledger.schedule)
    assert schedule.capacity == 1 << 14
    for before, steps in pairwise(
        [0, 16_383, 16_384, 20_000] + ([40_000, 300_000, 800_000, 1_200_000] if LONG else [])
    ):
        for t in range(before, steps):
            ledger.advance(1e-3 * (1 + (t // 20_000) % 2), decay)
        assert footprint(schedule) == memory
        gaps = [1, 2, 30, 57, 58, 100, 5000, schedule.capacity - 1]
        for gap, row, left, age in zip(gaps, *schedule.coefficients(ledger.since(*gaps)), strict=True):
            assert abs(left - float(ledger.left(gap))) <= ROUNDING
            for v in (1e-3, 1e-20):
                exact = float(direct_sum(ledger.terms(gap, schedule.window_length), v))
                assert v < row[SAFE] or abs(age * series(row, v) - exact) * math.sqrt(v) <= ROUNDING


def footprint(schedule: Schedule) -> dict[str, int]:
    """How large everything is that a schedule holds."""
    return {name: value.nbytes if isinstance(value, np.ndarray) else 1 for name, value in vars(schedule).items()}


def test_the_ring_is_longer_than_the_window() -> None:
    slow = Schedule((0.99, 0.999), 1e-8, amsgrad=False, step=0, tolerance=1e-15)
    assert slow.window_length == 4099
    assert slow.capacity >= 4 * slow.window_length


@pytest.mark.parametrize(
    ("betas", "amsgrad", "length"),
    [
        ((0.9, 0.999), False, 374),
        ((0.9, 0.999), True, 372),
        ((0.5, 0.99), False, 57),
        ((0.9, 0.95), False, 492),
        ((0.0, 0.99), False, 1),
        ((0.0, 0.99), True, 1),
    ],
)
def test_the_window_covers_all_that_momentum_does(betas: tuple[float, float], amsgrad: bool, length: int) -> None:
    assert window_length(*betas, amsgrad=amsgrad) == length
    ratio = betas[0] if amsgrad else betas[0] / math.sqrt(betas[1])
    assert ratio**length <= 1e-17
    check_betas(*betas, amsgrad=amsgrad)


@pytest.mark.parametrize("betas", [(0.9, 0.82), (0.7, 0.5), (0.94, 0.9), (0.3, 0.1)], ids=str)
def test_betas_are_refused_or_have_finite_coefficients(betas: tuple[float, float]) -> None:
    """Close to beta1 = sqrt(beta2) the e grow beyond what a float holds, long before the w are nothing."""
    try:
        check_betas(*betas, amsgrad=False)
    except ValueError:
        return
    ledger = Ledger(betas)
    ledger.run(310)
    for gap in (1, 30, 300):
        row = ledger.schedule.coefficients(ledger.since(gap))[0][0]
        assert not math.isnan(row[SAFE])
        for v in (1e-12, 1.0):
            if v >= row[SAFE]:
                assert relative_error(series(row, v), direct_sum(ledger.terms(gap), v)) <= ROUNDING + gap * UNIT


def test_terms_whose_e_no_float_can_hold() -> None:
    schedule = Schedule((0.7, 0.5), 1e-8, amsgrad=False, step=0, tolerance=1e-15)
    for _ in range(2200):
        schedule.advance(0.01, 0.0)
    weights, es = schedule.terms(0)
    assert not np.isnan(weights).any()
    assert np.isinf(es[-1])


@pytest.mark.parametrize("betas", [(0.95, 0.9), (0.9, 0.81), (0.999, 0.5), (0.5, 0.0), (0.0, 0.0)], ids=str)
def test_momentum_that_outlives_the_second_moment_is_refused(betas: tuple[float, float]) -> None:
    with pytest.raises(
        ValueError, match=r"Invalid betas: \(.*\) in group 3; deferred steps need beta1 < sqrt\(beta2\)"
    ):
        check_betas(*betas, amsgrad=False, where=" in group 3")
    check_betas(*betas, amsgrad=True)


@pytest.mark.parametrize(("betas", "amsgrad"), [((0.9999, 0.99999), False), ((0.9999, 0.9999), True)])
def test_a_momentum_that_acts_too_long_is_refused(betas: tuple[float, float], amsgrad: bool) -> None:
    with pytest.raises(ValueError, match=r"would act for \d{6} steps.*at most 65536\. Use a smaller beta1"):
        check_betas(*betas, amsgrad=amsgrad)


@pytest.mark.parametrize(("lr", "decay"), [(1.0, 1.0), (0.5, 3.0)])
def test_a_decay_that_leaves_nothing_is_refused_and_changes_nothing(lr: float, decay: float) -> None:
    ledger = Ledger((0.9, 0.999))
    ledger.run(3)
    with pytest.raises(ValueError, match=rf"lr \* weight_decay is {lr * decay}; expected less than 1"):
        ledger.schedule.advance(lr, decay)
    assert ledger.schedule.step == 3
    row = ledger.schedule.coefficients(ledger.since(3))[0][0]
    assert relative_error(series(row, 1.0), direct_sum(ledger.terms(3), 1.0)) <= ROUNDING


def test_schedules_that_go_alike_share_their_windows() -> None:
    def begin(step: int = 3) -> Schedule:
        return Schedule((0.9, 0.99), 1e-8, amsgrad=False, step=step, tolerance=1e-15)

    first, other = begin(), begin(step=4)
    second = first.twin()
    for rate in (0.1, 0.2, 0.3):
        for schedule in (first, second, other):
            schedule.advance(rate, 0.01)
        assert second.window is first.window
        assert second.record is first.record
        assert other.window is not first.window


def test_a_schedule_that_parts_from_another_is_as_if_alone() -> None:
    def begin() -> Schedule:
        return Schedule((0.9, 0.99), 1e-8, amsgrad=False, step=7, tolerance=1e-15)

    def run(*rates: float, schedule: Schedule | None = None) -> Schedule:
        schedule = schedule or begin()
        for rate in rates:
            schedule.advance(rate, 0.01)
        return schedule

    one = begin()
    others = one.twin(), one.twin()
    together = [run(0.1, 0.2, schedule=one), run(0.1, 0.2, schedule=others[0]), run(0.1, schedule=others[1])]
    for schedule, rates in zip(together, ((0.3, 0.4), (0.5, 0.4), (0.3, 0.4)), strict=True):
        for rate in rates:
            schedule.advance(rate, 0.01)
    alone = [run(0.1, 0.2, 0.3, 0.4), run(0.1, 0.2, 0.5, 0.4), run(0.1, 0.3, 0.4)]
    for schedule, expected in zip(together, alone, strict=True):
        assert_same(schedule, expected)


def assert_same(schedule: Schedule, expected: Schedule) -> None:
    assert (schedule.step, schedule.window.tolist()) == (expected.step, expected.window.tolist())
    since = np.arange(max(0, schedule.step - schedule.longest_wait), schedule.step)
    for found, other in zip(schedule.coefficients(since), expected.coefficients(since), strict=True):
        assert np.array_equal(found, other)
    for start in (since[0], since[-1]):
        for found, other in zip(schedule.terms(start), expected.terms(start), strict=True):
            assert np.array_equal(found, other)


@pytest.mark.parametrize("lag", [0, 1, 3000, 15_000])
def test_a_twin_may_lag_behind_for_longer_than_the_rings_are(lag: int) -> None:
    """And then take the same steps, until it takes others. The rings have 16,384 entries."""

    def begin() -> Schedule:
        return Schedule((0.5, 0.9), 1e-8, amsgrad=False, step=2, tolerance=1e-15)

    ahead, alone = begin(), begin()
    behind = ahead.twin()
    for step in range(18_000):
        ahead.advance(0.1 + 0.1 * (step % 7), 1e-4)
        if step >= lag:
            behind.advance(0.1 + 0.1 * ((step - lag) % 7), 1e-4)
            alone.advance(0.1 + 0.1 * ((step - lag) % 7), 1e-4)
    assert_same(behind, alone)
    for _ in range(3):
        behind.advance(0.7, 0.0)
        alone.advance(0.7, 0.0)
    assert_same(behind, alone)

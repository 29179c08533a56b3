"""What tables know of past steps, over more of them than are kept: no drift, no growth, and each table its own.

Runs of this length take minutes through an optimizer, so the schedule is tested by itself.
"""

from __future__ import annotations

import math
from decimal import Decimal, localcontext

import numpy as np

from rowstep._schedule import KEPT, Path, Schedule
from tests.helpers.deferred_cases import LONG


def begin(betas: tuple[float, float]) -> Schedule:
    """With room for 16,384 steps, or in a short run for 2,048."""
    path = Path(betas, 1e-8, amsgrad=False, step=2, tolerance=1e-15)
    if not LONG:
        path.capacity, path.longest_wait = path.capacity // 8, path.longest_wait // 8
    return path.begin()


def footprint(schedule: Schedule) -> dict[str, int]:
    """How large everything is that a schedule holds."""
    holders = {**vars(schedule.path), **vars(schedule.timeline), "window": schedule._window._memory}
    return {name: value.nbytes if isinstance(value, np.ndarray) else 1 for name, value in holders.items()}


def test_a_long_run_does_not_drift_and_does_not_grow() -> None:
    """2,500 steps, or 1.2 million, go round the ring."""
    schedule = begin((0.5, 0.99))
    memory, kept = footprint(schedule), []
    for step in range(1_200_000 if LONG else 2_500):
        lr = 1e-3 * (1 + (step // 20_000) % 2)
        schedule = schedule.advanced(lr, 0.01)
        kept.append(1 - lr * 0.01)
    assert footprint(schedule) == memory
    gaps = [1, 57, 500, schedule.path.capacity - 1]
    terms, aged = schedule.coefficients(schedule.step - np.array(gaps))
    left = terms[:, KEPT] * aged
    with localcontext(prec=50):
        for gap, found in zip(gaps, left, strict=True):
            assert abs(found - float(math.prod(map(Decimal, kept[-gap:]), start=Decimal(1)))) <= 2e-14


def test_a_table_that_lags_behind_another_is_as_if_alone() -> None:
    """Twins share what they know, until the one ahead would write over what the one behind has not come to yet."""
    behind, alone = begin((0.5, 0.9)), begin((0.5, 0.9))
    ahead = behind
    for step in range(17_000 if LONG else 2_200):
        ahead = ahead.advanced(0.1 + 0.1 * (step % 7), 1e-4)
    for step in range(300):
        behind, alone = (each.advanced(0.1 + 0.1 * (step % 7), 1e-4) for each in (behind, alone))
    assert_same(behind, alone)
    behind, alone = (each.advanced(0.7, 0.0) for each in (behind, alone))  # another step than the one ahead took
    assert_same(behind, alone)


def assert_same(schedule: Schedule, expected: Schedule) -> None:
    assert (schedule.step, schedule._window.table.tolist()) == (expected.step, expected._window.table.tolist())
    since = np.arange(max(0, schedule.step - schedule.path.longest_wait), schedule.step)
    for found, other in zip(schedule.coefficients(since), expected.coefficients(since), strict=True):
        assert np.array_equal(found, other)
    for start in (since[0], since[-1]):
        for found, other in zip(schedule.terms(start), expected.terms(start), strict=True):
            assert np.array_equal(found, other)

"""Whether a launch is worth several threads is learned from those before: on a machine that is simulated here."""

from __future__ import annotations

import random
from collections.abc import Callable

from rowstep._kernels.pace import Pace

choose = Pace.threads  # all other tests have as many threads as they ask for


def run(pace: Pace, launches: int, seconds: Callable[[int], float]) -> list[int]:
    """The threads of so many launches, each of which takes so long on one thread or on two."""
    used = []
    for _ in range(launches):
        threads = choose(pace, 2)
        pace.took(threads, seconds(threads))
        used.append(threads)
    return used


def quiet(threads: int) -> float:
    return {1: 1.0, 2: 0.6}[threads] * random.uniform(1, 1.3)


def busy(threads: int) -> float:
    """Beside one busy process per core: now and then two threads are as fast as ever."""
    return random.uniform(1, 2) if threads == 1 else random.choice([0.6, 3.0, 12.0, 15.0])


def test_threads_are_used_where_they_help() -> None:
    random.seed(0)
    used = run(Pace(), 1000, quiet)
    assert used.count(1) < 10


def test_one_slow_launch_in_a_hundred_is_no_reason_to_use_one_thread() -> None:
    """Seen on a quiet virtual machine: now and then two threads take ten times as long, and the next time do not."""
    for seed in range(20):
        random.seed(seed)
        used = run(Pace(), 2000, lambda threads: quiet(threads) * (10 if random.random() < 0.01 else 1))
        assert used.count(1) < 200


def test_the_first_launch_says_nothing_because_it_compiles() -> None:
    for slow in (1, 2):
        pace = Pace()
        choose(pace, 2)
        pace.took(slow, 1000.0)
        assert run(pace, 100, quiet).count(1) < 10


def test_beside_busy_processes_it_takes_little_longer_than_one_thread() -> None:
    for seed in range(20):
        random.seed(seed)
        pace, total, alone = Pace(), 0.0, 0.0
        for _ in range(2000):
            threads = choose(pace, 2)
            seconds = busy(threads)
            pace.took(threads, seconds)
            total, alone = total + seconds, alone + busy(1)
        assert total < 1.3 * alone


def test_it_notices_when_the_machine_gets_busy_and_quiet_again() -> None:
    random.seed(0)
    pace = Pace()
    assert run(pace, 200, quiet)[-100:].count(2) > 95
    assert run(pace, 3000, busy)[-1000:].count(1) > 980
    assert run(pace, 2000, quiet)[-100:].count(2) > 95

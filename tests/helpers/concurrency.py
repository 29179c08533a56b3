"""Several Python threads at once, with an end: what they raise is raised, and a deadlock is an error."""

from __future__ import annotations

import faulthandler
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# No test waits this long unless threads wait for each other.
LONGEST_WAIT = 120.0


def together(*actions: Callable[[], object]) -> None:
    """Run each of these in a thread of its own, all from the same moment on."""
    start = threading.Barrier(len(actions))
    errors: list[BaseException] = []

    def run(action: Callable[[], object]) -> None:
        try:
            start.wait(LONGEST_WAIT)
            action()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(action,), daemon=True) for action in actions]
    with quick_switches():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONGEST_WAIT)
    if any(thread.is_alive() for thread in threads):
        faulthandler.dump_traceback()
        raise TimeoutError("threads wait for each other")
    if errors:
        raise errors[0]


@contextmanager
def quick_switches() -> Iterator[None]:
    """Let Python change threads as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)

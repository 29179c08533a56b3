"""Several Python threads at once, with an end: what they raise is raised, and a deadlock is an error."""

from __future__ import annotations

import faulthandler
import sys
import threading
from collections.abc import Callable

# No test waits this long unless threads wait for each other.
LONGEST_WAIT = 120.0


def together(*actions: Callable[[], object]) -> None:
    """Run each of these in a thread of its own, all from the same moment on, with as many switches as Python can."""
    start = threading.Barrier(len(actions))
    errors: list[BaseException] = []

    def run(action: Callable[[], object]) -> None:
        try:
            start.wait(LONGEST_WAIT)
            action()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(action,), daemon=True) for action in actions]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONGEST_WAIT)
    finally:
        sys.setswitchinterval(interval)
    if any(thread.is_alive() for thread in threads):
        faulthandler.dump_traceback()
        raise TimeoutError("threads wait for each other")
    if errors:
        raise errors[0]

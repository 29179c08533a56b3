"""A process that holds one contestant, and steps it when the driver asks; `process` starts it in its environment.

It reads a line of JSON per request, and answers each with a line of JSON. It imports nothing but what every
environment has.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import platform
import sys
import time
import traceback
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.data import Data


class Worker:
    """The contestant, made anew for each case."""

    def __init__(self, module: str, name: str, threads: int) -> None:
        self.module, self.name, self.threads = module, name, threads
        self.contestant: Any = None
        self.steps = 0

    def hello(self, packages: list[str]) -> dict[str, Any]:
        """Import all that is needed, and say which versions were found."""
        importlib.import_module(self.module)
        return {"python": platform.python_version()} | {package: version(package) for package in packages}

    def open(self, folder: str) -> dict[str, Any]:
        self.close()  # before the next tables are made: there may be room for one set of them only
        kind = getattr(importlib.import_module(self.module), self.name)
        self.contestant = kind(Data.read(Path(folder), self.threads))
        self.steps = 0
        gc.collect()
        return {}

    def turn(self, steps: int, warm_up: float = 0.0) -> dict[str, Any]:
        """Take so many steps on the next batches, and time each, after some that count for nothing.

        Those go on for ``warm_up`` seconds. They wake threads, let the system find a core for each, and fill caches,
        which others have emptied since the last turn.
        """
        until = time.perf_counter() + warm_up
        while time.perf_counter() < until:
            self._step()
        return {"seconds": [self._step() for _ in range(steps)]}

    def _step(self) -> float:
        self.contestant.prepare(self.steps)
        start = time.perf_counter()
        self.contestant.run()
        seconds = time.perf_counter() - start
        self.steps += 1
        return seconds

    def state(self, table: int, rows: str, to: str) -> dict[str, Any]:
        """Write these rows of the weights, and of the moments where the contestant shows them, to a file."""
        np.savez(to, **self.contestant.state(table, np.load(rows)))
        return {}

    def close(self) -> dict[str, Any]:
        self.contestant = None
        gc.collect()
        return {}


def main(module: str, name: str, threads: str) -> None:
    # Packages print where they like: replies get a descriptor of their own, and standard output becomes the log.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    gc.disable()  # a collection takes milliseconds, and would fall into somebody's turn
    worker = Worker(module, name, int(threads))
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = getattr(worker, request["do"])(**request["with"])
        except Exception as error:  # whatever a peer raises is the reason why it does not take part
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=replies, flush=True)
    os._exit(0)  # nobody is left to answer, and tearing down large packages takes seconds


if __name__ == "__main__":
    main(*sys.argv[1:])

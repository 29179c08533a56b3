"""Where the step of a sharded table spends its time.

Private functions of `rowstep.distributed` are wrapped while the watch runs: the library itself keeps no times.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch.distributed as dist

from benchmarks.distributed.training import Trainer
from rowstep.distributed import _exchange, _fetch, _traffic

DEDUPE, READ, PHASES = "dedupe", "read rows", ("rest of forward", "rest of backward", "optimizer")
SWAPS = {
    "headers": "headers, and waiting",
    "ids": "send ids",
    "votes": "vote",
    "rows": "send rows",
    "gradients": "send gradients",
}
STAGES = (DEDUPE, *(SWAPS[kind] for kind in ("headers", "ids")), READ, SWAPS["votes"], SWAPS["rows"])
STAGES = (*STAGES, PHASES[0], SWAPS["gradients"], *PHASES[1:])


class Stopwatch:
    """Stages are timed without what they contain of other stages."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._seconds = dict.fromkeys(STAGES, 0.0)
        self._stack: list[str] = []
        self._since = 0.0
        self._message = ""

    def medians(self, steps: int) -> dict[str, float]:
        """Seconds of each stage, the median over so many steps."""
        with self._wrapped():
            taken = [self._one_step() for _ in range(steps)]
        return {name: statistics.median(seconds[name] for seconds in taken) for name in STAGES}

    def _one_step(self) -> dict[str, float]:
        self._seconds = dict.fromkeys(STAGES, 0.0)
        dist.barrier()
        for name, phase in zip(PHASES, self._trainer.phases, strict=True):
            with self._stage(name):
                phase()
        return self._seconds

    @contextlib.contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        self._charge()
        self._stack.append(name)
        try:
            yield
        finally:
            self._charge()
            self._stack.pop()

    def _charge(self) -> None:
        """What has passed since the last change goes to the innermost stage."""
        now = time.perf_counter()
        if self._stack:
            self._seconds[self._stack[-1]] += now - self._since
        self._since = now

    @contextlib.contextmanager
    def _wrapped(self) -> Iterator[None]:
        count, swap, asking, read = _traffic.count, dist.all_to_all_single, _fetch.Desk._ask, _fetch.Desk._read

        def note_message(kind: str, *rest: Any) -> None:
            self._message = kind  # it is counted right before it is sent
            count(kind, *rest)

        def timed_swap(*args: Any, **options: Any) -> Any:
            with self._stage(SWAPS[self._message]):
                return swap(*args, **options)

        def timed_asking(*args: Any) -> Any:
            with self._stage(DEDUPE):
                return asking(*args)

        def timed_read(*args: Any) -> Any:
            with self._stage(READ):
                return read(*args)

        with (
            mock.patch.object(_exchange, "count", note_message),
            mock.patch.object(dist, "all_to_all_single", timed_swap),
            mock.patch.object(_fetch.Desk, "_ask", timed_asking),
            mock.patch.object(_fetch.Desk, "_read", timed_read),
        ):
            yield

"""Measurements that need an interpreter of their own: the first step's time, and a step's peak memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.load import watch

ROOT = Path(__file__).parents[2]  # where `benchmarks` can be imported, whatever the current directory


@dataclass(frozen=True)
class FirstStep:
    cold: float  # seconds, kernels compiled
    cached: float  # seconds, kernels loaded from Numba's cache
    others: float  # share of the machine that other work took meanwhile


@dataclass(frozen=True)
class PeakMemory:
    rows: int
    rowstep: float  # bytes per id
    torch: float


def first_step() -> FirstStep:
    with tempfile.TemporaryDirectory() as cache, watch() as load:
        cold, cached = (in_fresh_interpreter("first-step", NUMBA_CACHE_DIR=cache) for _ in range(2))
    return FirstStep(cold, cached, load.others)


def peak_memory(rows: Sequence[int], ids: int) -> list[PeakMemory]:
    """Nothing where the system cannot tell: resetting the peak is Linux's alone."""
    if not sys.platform.startswith("linux"):
        return []
    # A process for each: workspace that is kept for the next step must not serve the next table.
    return [PeakMemory(count, *in_fresh_interpreter("memory", ids, count)) for count in rows]


def in_fresh_interpreter(*arguments: object, **environment: str) -> Any:
    command = [sys.executable, "-m", "benchmarks.sparse.child", *map(str, arguments)]
    env = os.environ | environment
    done = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(done.stdout)

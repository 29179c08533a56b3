"""All that a run has measured, and its JSON."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rowstep.cli._bench.fresh import FirstStep, PeakMemory
from rowstep.cli._bench.timing import Measurement


@dataclass
class Results:
    command: str
    quick: bool
    measurements: list[Measurement] = field(default_factory=list)
    state_bytes_per_weight: float | None = None
    first_step: FirstStep | None = None
    memory: list[PeakMemory] = field(default_factory=list)

    def of_kind(self, kind: str) -> list[Measurement]:
        return [measured for measured in self.measurements if measured.kind == kind]

    def as_json(self) -> dict[str, Any]:
        return {
            "command": self.command,
            "quick": self.quick,
            "machine": machine(),
            "measurements": [_measurement(measured) for measured in self.measurements],
            "state_bytes_per_weight": self.state_bytes_per_weight,
            "first_step_seconds": asdict(self.first_step) if self.first_step else None,
            "peak_memory_bytes_per_id": [asdict(peak) for peak in self.memory],
        }


def machine() -> dict[str, Any]:
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "backend": os.environ.get("ROWSTEP_BACKEND", "default"),
        **{package: version(package) for package in ("rowstep", "torch", "numba", "numpy")},
    }


def _cpu() -> str:
    """Linux keeps the processor's name apart; elsewhere Python knows it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _measurement(measured: Measurement) -> dict[str, Any]:
    return {
        "kind": measured.kind,
        "name": measured.name,
        "about": measured.about,
        "threads": measured.threads,
        "seconds": {
            name: {"min": timing.min, "median": timing.median, "all": timing.seconds}
            for name, timing in measured.timings.items()
        },
        "left_out": measured.left_out,
        "share_of_machine_taken_by_others": measured.others,
    }

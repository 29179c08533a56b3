"""Which machine and which versions a run was measured with."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any


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

"""Which torch is taken, and what someone with an older one is told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import rowstep
from rowstep._torch_version import OLDEST, refuse_older

# A process whose torch says that it is an old one.
OLD = """
import torch
torch.__version__ = torch.torch_version.TorchVersion("2.7.1+cu126")
"""

USES = [
    *(f"from rowstep import {name}" for name in rowstep.__all__),
    "import rowstep.distributed",
]

TRY_ALL = f"""
for use in {USES}:
    try:
        exec(use)
    except ImportError as error:
        print(error)
    else:
        print("no error:", use)
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "version", ["2.8.0a0+gitabc", "2.8", "2.10.0.dev20260101", "2.13.0+cpu", "12.1.0", "unknown", torch.__version__]
)
def test_versions_that_are_taken(version: str) -> None:
    refuse_older(version)


@pytest.mark.parametrize("version", ["2.7.1", "2.7.0a0+gitabc", "2.6.0+cu124", "1.13.1"])
def test_older_versions_are_refused_with_the_way_out(version: str) -> None:
    with pytest.raises(ImportError) as raised:
        refuse_older(version)
    assert str(raised.value) == (
        f"torch {version} is installed, but rowstep needs torch 2.8 or newer: run `pip install --upgrade torch`, or "
        "use rowstep.arrays, which needs no torch"
    )


def test_whatever_uses_torch_refuses_an_old_one() -> None:
    done = run(OLD + TRY_ALL)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(USES)
    assert {line.partition(" or newer")[0] for line in lines} == {
        "torch 2.7.1+cu126 is installed, but rowstep needs torch 2.8"
    }


def test_arrays_do_not_care() -> None:
    done = run(OLD + "import rowstep.arrays; from rowstep import arrays; print(arrays.Adam.__name__)")
    assert (done.returncode, done.stdout) == (0, "Adam\n"), done.stderr


def test_pip_is_told_the_same() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert f'"torch>={OLDEST[0]}.{OLDEST[1]}"' in text

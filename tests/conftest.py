"""What every test gets: the two backends, one place for compiled kernels, and threads and autograd put back."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from ranks import Ranks


def _kernel_cache() -> Path:
    """A directory of compiled kernels that all runs share, until a kernel changes.

    Numba looks at the file of the function it compiled and not at those of the functions it calls, so the name holds
    a hash of all of them. It holds the CPU that a run compiles for as well: Numba keeps code for several apart, but two
    runs that write to one cache at the same time can each give their file the same name.
    """
    kernels = Path(__file__).parent.parent / "src" / "rowstep" / "_kernels"
    digest = hashlib.sha256(str(Path.home()).encode())
    for setting in ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES"):
        digest.update(os.environ.get(setting, "").encode())
    for source in sorted(kernels.glob("*.py")):
        digest.update(source.read_bytes())
    return Path(tempfile.gettempdir()) / f"rowstep-kernels-{digest.hexdigest()[:16]}"


# Numba reads it once, when it is imported, and only the first step on the numba backend does that.
os.environ["NUMBA_CACHE_DIR"] = str(_kernel_cache())

THREADS = int(os.environ.get("ROWSTEP_TEST_THREADS", "1"))
"""How many threads torch is told to use in a test that does not say it itself. ``make cpus`` tries four."""

settings.register_profile("rowstep", deadline=None, derandomize=True, max_examples=50, database=None)
settings.load_profile("rowstep")


@pytest.fixture(params=["reference", "numba"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test of the update runs once on each backend."""
    name: str = request.param
    monkeypatch.setenv("ROWSTEP_BACKEND", name)
    return name


@pytest.fixture(autouse=True)
def same_threads_and_one_seed() -> Iterator[None]:
    """A test that wants other threads says so, and random numbers are the same in any order of tests."""
    threads = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
    torch.set_grad_enabled(True)  # an interrupt that strikes while torch.no_grad() ends leaves it off


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Processes that stand for ranks; started by the first test that needs them."""
    workers = Ranks(on_warning="error")
    yield workers
    workers.close()

"""What every test gets: the backends, one place for compiled kernels, and threads and autograd put back."""

from __future__ import annotations

import gc
import getpass
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from rowstep._kernels.pace import Pace
from tests.helpers.crash_records import *  # noqa: F403  hooks of pytest
from tests.helpers.ranks import Ranks

# Where all test runs of this user keep compiled kernels. Numba reads it once, when it is imported, and only the first
# step on the numba backend does that.
os.environ["NUMBA_CACHE_DIR"] = str(Path(tempfile.gettempdir()) / f"rowstep-kernels-{getpass.getuser()}")

# Triton's kernels run on its interpreter, on the CPU. Triton reads this when it is imported, which torch may do.
os.environ.setdefault("TRITON_INTERPRET", "1")

THREADS = int(os.environ.get("ROWSTEP_TEST_THREADS", "1"))
"""How many threads torch is told to use in a test that does not say it itself. ``make cpus`` tries four."""

# A shell that starts the tests in the background lets them ignore Ctrl-C, which some of them send.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("rowstep", deadline=None, derandomize=True, max_examples=50, database=None)
settings.load_profile("rowstep")


def pytest_collection_finish() -> None:
    """Let garbage collection skip what is imported, 200,000 objects: a full one then takes 0.07 s and not 0.2."""
    gc.collect()
    gc.freeze()


@pytest.fixture(params=["reference", "numba", *(["triton"] if os.environ.get("ROWSTEP_TRITON") == "1" else [])])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test of the update runs once on each backend; some, under ``make gpu``, on Triton's interpreter too."""
    name: str = request.param
    if name == "triton":
        import tests.helpers.interpreter  # noqa: F401  for its effect
    monkeypatch.setenv("ROWSTEP_BACKEND", name)
    return name


@pytest.fixture(autouse=True)
def same_threads_and_one_seed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A test that wants other threads says so and gets them, and random numbers are the same in any order of tests."""
    monkeypatch.setattr(Pace, "threads", lambda self, most: most)
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

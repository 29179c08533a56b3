"""examples/sharded.py under torchrun: workers die, a machine is lost, and the run ends as if nothing had happened.

The workers run on the reference backend: what is tested here does not depend on it, and Numba takes time to start.
"""

from __future__ import annotations

import contextlib
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from tests.helpers.deferred_cases import only_long
from tests.helpers.ranks import Ranks

SCRIPT = Path(__file__).parents[2] / "examples" / "sharded.py"
STEPS, SAVE_EVERY, DIES_AT, LAST_SAVED = 40, 10, 25, 20
TIMEOUT_SECONDS = 300  # on a busy machine two torchruns side by side took over 120


class Torchrun:
    """One agent, with what it and its workers print."""

    def __init__(self, options: list[str], checkpoints: Path, *script_options: str) -> None:
        self._printed = checkpoints.parent / f"printed-{uuid.uuid4()}"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--local-addr=127.0.0.1", *options]
        run = [str(SCRIPT), "--checkpoints", str(checkpoints), f"--steps={STEPS}", f"--save-every={SAVE_EVERY}"]
        with self._printed.open("w") as printed:
            self.process = subprocess.Popen(
                [*torchrun, *run, *script_options],
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
                env=os.environ | {"ROWSTEP_BACKEND": "reference"},  # not of this process: ranks may be started in it
                start_new_session=True,  # an interrupt of the tests ends it through close, with its workers
            )

    @property
    def printed(self) -> str:
        return self._printed.read_text()

    def digest(self) -> str:
        """Wait for the end, which must be a good one; return what was printed of the final state."""
        assert self.process.wait(TIMEOUT_SECONDS) == 0, self.printed
        found = re.search(r"sha256 (\w{64})", self.printed)
        assert found, self.printed
        return found[1]

    def close(self) -> None:
        """End the agent and its workers, if they have not ended."""
        self.process.terminate()
        try:
            self.process.wait(10)  # it ends its workers first
        except subprocess.TimeoutExpired:
            workers = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
            self.process.kill()
            self.process.wait()
            for worker in workers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(worker), signal.SIGKILL)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[contextlib.ExitStack]:
    """Torchruns that are pushed here are ended with the test."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with contextlib.ExitStack() as stack:
        yield stack


def in_this_process(checkpoints: Path) -> tuple[str, dict[str, Tensor]]:
    """The digest and the state of a run of a single rank, with one thread as the others: sums have the same order."""
    torch.set_num_threads(1)
    example: dict[str, Any] = runpy.run_path(str(SCRIPT))
    with mock.patch.dict(os.environ, ROWSTEP_BACKEND="reference"):
        _, state = example["main"](checkpoints, steps=STEPS, save_every=SAVE_EVERY)
    return example["digest"](state), state


def undisturbed(rank: int, checkpoints: Path) -> str:
    """The digest of a run of these ranks, which have joined already."""
    joined = mock.patch.object(dist, "init_process_group")
    with joined, mock.patch.object(dist, "destroy_process_group"):
        return in_this_process(checkpoints)[0]


def test_a_worker_that_is_killed_changes_no_bit(started: contextlib.ExitStack, ranks: Ranks, tmp_path: Path) -> None:
    two_workers = ["--standalone", "--nproc-per-node=2", "--max-restarts=3"]
    unfinished = tmp_path / "killed" / "step-000030"
    unfinished.mkdir(parents=True)
    (unfinished / "__0_0.distcp").write_bytes(b"half a checkpoint")

    killed = Torchrun(two_workers, tmp_path / "killed", f"--die-at={DIES_AT}", "--die-rank=1")
    started.callback(killed.close)

    expected = ranks.run(2, undisturbed, tmp_path / "undisturbed")
    assert [killed.digest()] * 2 == expected
    starts = [f"2 rank(s) start at step {step}" for step in (0, LAST_SAVED)]
    assert re.findall(r"\d+ rank\(s\) start at step \d+", killed.printed) == starts


@only_long  # half a minute, most of it torchrun's waiting for the machine that is lost
def test_the_other_machine_goes_on_alone(
    started: contextlib.ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    # The rendezvous is neither machine's, so that any can be lost.
    rendezvous = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    untouched = rendezvous.num_keys()
    options = [
        "--nproc-per-node=1",
        "--max-restarts=3",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{rendezvous.port}",
        "--rdzv-id=lost-machine",
        # The other waits 3 seconds for a second machine, and takes one that was silent for 3 seconds for lost.
        "--rdzv-conf=is_host=0,join_timeout=100,last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3",
    ]
    checkpoints = tmp_path / "elastic"
    # The one to be lost will not begin alone, and is there first: so both begin together, however slow they are.
    lost = Torchrun(["--nnodes=2", *options], checkpoints, f"--die-at={DIES_AT}", "--lose-machine")
    started.callback(lost.close)
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while rendezvous.num_keys() == untouched and time.monotonic() < deadline:
        time.sleep(0.05)
    other = Torchrun(["--nnodes=1:2", *options], checkpoints)
    started.callback(other.close)

    ended_with = other.digest()
    assert lost.process.wait(TIMEOUT_SECONDS) == -signal.SIGKILL
    assert "2 rank(s) start at step 0" in lost.printed + other.printed
    assert f"1 rank(s) start at step {LAST_SAVED}" in other.printed

    last_shared = f"step-{LAST_SAVED:06d}"
    shutil.copytree(checkpoints / last_shared, tmp_path / "copied" / last_shared)
    assert in_this_process(tmp_path / "copied")[0] == ended_with

    again, state = in_this_process(checkpoints)  # nothing is left to do
    assert again == ended_with
    for name, value in in_this_process(tmp_path / "undisturbed")[1].items():
        # Not to the bit, since 20 steps took their sums over a batch in two parts; weights differed by up to 1e-5.
        difference, largest = (state[name] - value).abs().max(), value.abs().max()
        assert difference <= 1e-4 * largest, name


def test_several_torchruns_must_not_share_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "True", "GROUP_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match=r"2 torchruns share a store .* TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        runpy.run_path(str(SCRIPT))["main"]()

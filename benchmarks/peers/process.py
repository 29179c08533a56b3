"""Worker processes, seen from the driver: started in their environment, on their share of the cores."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.peers.catalogue import CONTESTANTS, Peer
from benchmarks.peers.environments import ROOT, MissingError

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")


class Process:
    """One peer's worker. It waits for requests, so that it takes no core while others have their turn."""

    def __init__(self, peer: Peer, threads: int) -> None:
        self.peer = peer
        interpreter = peer.environment.interpreter() if peer.environment else Path(sys.executable)
        module, _, kind = peer.kind.rpartition(".")
        command = [str(interpreter), "-m", "benchmarks.peers.worker", f"{CONTESTANTS}.{module}", kind, str(threads)]
        self.log = tempfile.TemporaryFile()  # noqa: SIM115  # closed by end()
        with _on_cores(threads):
            self.process: Any = subprocess.Popen(
                command,
                cwd=ROOT,
                env=os.environ | dict.fromkeys(THREADS, str(threads)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.log,
                text=True,
            )
        try:
            self.versions: dict[str, str] = self.ask("hello", packages=peer.packages)
        except MissingError:
            self.end()
            raise

    def ask(self, what: str, **arguments: Any) -> dict[str, Any]:
        """Raises MissingError if the worker cannot do it, or has died of it."""
        try:
            self.process.stdin.write(json.dumps({"do": what, "with": arguments}) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise MissingError(self._last_words())
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise MissingError(reply["error"])
        return reply

    def turn(self, steps: int, warm_up: float = 0.0) -> list[float]:
        return list(self.ask("turn", steps=steps, warm_up=warm_up)["seconds"])

    def state(self, table: int, rows: NDArray[np.int64]) -> dict[str, NDArray[np.float32]]:
        with tempfile.TemporaryDirectory() as folder:
            asked, answered = Path(folder, "rows.npy"), Path(folder, "state.npz")
            np.save(asked, rows)
            self.ask("state", table=table, rows=str(asked), to=str(answered))
            with np.load(answered) as arrays:
                return dict(arrays)

    def end(self) -> None:
        self.process.stdin.close()
        self.process.stdout.close()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()

    def _last_words(self) -> str:
        code = self.process.wait()
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        self.log.seek(0)
        words = self.log.read().decode(errors="replace").strip().splitlines()
        return f"its worker {how}: {words[-1] if words else 'no message'}"


@contextmanager
def _on_cores(count: int) -> Iterator[None]:
    """What is started here stays on so many cores: some packages take their number of threads from nothing else.

    The last ones, since systems like to handle interrupts on the first. Where the system cannot do that, threads are
    limited by the environment variables alone.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[-count:])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class Crew:
    """The workers of one kind of case and one number of threads, which packages take when they start, and keep.

    They are started when first needed, and stay for the cases that follow. `versions` and `missing`, the reasons of
    those who cannot take part, are by the names of peers, and shared by crews.
    """

    def __init__(self, kind: str, threads: int, versions: dict[str, dict[str, str]], missing: dict[str, str]) -> None:
        self.kind, self.threads = kind, threads
        self.versions, self.missing = versions, missing
        self.workers: dict[str, Process] = {}

    def worker(self, peer: Peer) -> Process:
        """Raises MissingError; once missing is missing for good, so that nothing is installed twice in vain."""
        if peer.name in self.missing:
            raise MissingError(self.missing[peer.name])
        if peer.name not in self.workers:
            try:
                self.workers[peer.name] = Process(peer, self.threads)
            except MissingError as error:
                self.missing[peer.name] = str(error)
                raise
            self.versions[peer.name] = self.workers[peer.name].versions
        return self.workers[peer.name]

    def dismiss(self, peer: Peer) -> None:
        """After a failure: what is left of the worker is not to be trusted."""
        if worker := self.workers.pop(peer.name, None):
            worker.end()

    def end(self) -> None:
        for worker in self.workers.values():
            worker.end()
        self.workers.clear()

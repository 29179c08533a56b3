"""One case after the other: give its data to all workers, check that they agree, let them take turns."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks import cases
from benchmarks.cases import Case
from benchmarks.peers.agreement import Agreement
from benchmarks.peers.catalogue import Peer
from benchmarks.peers.data import BLOCK, Data
from benchmarks.peers.environments import MissingError
from benchmarks.peers.process import Crew, Process
from benchmarks.timing import Measurement, Timing, no_garbage_collection, watch

SECONDS_PER_PEER = 4.0  # of a measurement: who is slower than others takes part in fewer rounds
FEWEST_ROUNDS = 3
SLOW = 1.0  # seconds; in such a step, cold caches and sleeping threads do not show

# A turn. Threads of OpenMP go on spinning after their work, those of Intel's for 200 ms: who comes next would have to
# share a core with them. Two threads also begin on one core at times, and part after some milliseconds. With one step
# of warm-up and no pause, the median of 1M x 64 Zipf bags on two threads was 11.3 ms, with a minimum of 6.5.
PAUSE = 0.25
WARM_UP = 0.05
TIMED_STEPS = 3

# Who is alive at the same time: tables of 10 million rows do not fit for all peers at once.
SHARE = 0.75  # of the free memory; the rest is for copies while tables are made, and for the system
WITHOUT_A_WORD = 8e9  # bytes taken for free where the system does not tell


def data_of(case: Case, threads: int) -> Data:
    """As `benchmarks.cases` draws it for the other suites."""
    return Data(
        rows=case.rows,
        dim=case.dim,
        ids=np.array([[table.numpy() for table in batch] for batch in cases.batches_of_ids(case)]),
        values=np.array([[table.numpy() for table in batch] for batch in cases.values(case)]),
        block=cases.parameters(Case("", min(case.rows, BLOCK), case.dim, 0))[0].detach().numpy(),
        threads=threads,
        bag=case.bag,
    )


def measure(kind: str, case: Case, peers: Sequence[Peer], crew: Crew, repeats: int) -> Iterator[Measurement]:
    """A measurement per group of peers that fit into memory together; the first peer is in all of them."""
    first, *others = peers
    data = data_of(case, crew.threads)
    agreement = Agreement(data)
    with tempfile.TemporaryDirectory() as folder:
        data.write(Path(folder))
        left_out: dict[str, str] = {}
        for group in groups(others, first, case.weights, free_bytes()):
            workers = list(_open(group, crew, folder, agreement, left_out))
            turns = Turns(workers, repeats)
            with watch(worker.process.pid for worker in workers) as load, no_garbage_collection():
                turns.take()
            if first.name in turns.lost:
                raise MissingError(f"{first.name}: {turns.lost[first.name]}")
            timings = {name: Timing.of(taken) for name, taken in turns.seconds.items() if name not in turns.lost}
            for worker in workers:
                if worker.peer.name in turns.lost:
                    crew.dismiss(worker.peer)
                else:
                    worker.ask("close")
            reasons = left_out | turns.lost
            yield Measurement(kind, case.name, case.about, crew.threads, timings, reasons, load.others)
            left_out = {}


def _open(
    group: Iterable[Peer], crew: Crew, folder: str, agreement: Agreement, left_out: dict[str, str]
) -> Iterator[Process]:
    """Workers with their tables, after their first steps. Who cannot is left out with its reason."""
    for number, peer in enumerate(group):
        try:
            worker = crew.worker(peer)
            worker.ask("open", folder=folder)
            agreement.check(worker)
        except MissingError as error:
            if number == 0:
                raise
            left_out[peer.name] = str(error)
            crew.dismiss(peer)
        else:
            yield worker


class Turns:
    """A B C, A B C, ... with fewer rounds for those who take long."""

    def __init__(self, workers: Sequence[Process], repeats: int) -> None:
        self.workers, self.repeats = workers, repeats
        self.seconds: dict[str, list[float]] = {worker.peer.name: [] for worker in workers}
        self.lost: dict[str, str] = {}
        self.turns: dict[str, tuple[int, float]] = {}  # timed steps, and seconds of warm-up
        self.rounds: dict[str, int] = {}
        for worker in workers:
            self._plan(worker)

    def take(self) -> None:
        for number in range(self.repeats):
            for worker in self.workers:
                name = worker.peer.name
                if number < self.rounds[name] and name not in self.lost:
                    time.sleep(PAUSE)
                    self.seconds[name] += self._turn(worker)

    def _plan(self, worker: Process) -> None:
        """What a turn of this worker is, and how many it gets."""
        name, fewest = worker.peer.name, min(FEWEST_ROUNDS, self.repeats)
        self.turns[name], self.rounds[name] = (1, 0.0), fewest
        if sum(self._turn(worker)) > SLOW or name in self.lost:
            return
        self.turns[name] = TIMED_STEPS, WARM_UP
        start = time.perf_counter()
        self._turn(worker)
        self.rounds[name] = max(fewest, int(SECONDS_PER_PEER / (time.perf_counter() - start)))

    def _turn(self, worker: Process) -> list[float]:
        try:
            return worker.turn(*self.turns[worker.peer.name])
        except MissingError as error:
            self.lost[worker.peer.name] = str(error)
            return []


def groups(peers: Iterable[Peer], first: Peer, weights: int, free: float) -> list[list[Peer]]:
    """Peers in the order given, each group with `first` before them: all ratios are to that one, in the same group.

    A peer that fits with nobody but `first` still gets a group: it may fail, and its failure is then reported.
    """
    made: list[list[Peer]] = []
    for peer in peers:
        if not made or weights * sum(other.bytes_per_weight for other in [*made[-1], peer]) > SHARE * free:
            made.append([first])
        made[-1].append(peer)
    return made


def free_bytes() -> float:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return WITHOUT_A_WORD
    found = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return 1024.0 * int(next(found, WITHOUT_A_WORD / 1024))

"""The workers that are alive. They are started when first needed, and stay for the cases that follow."""

from __future__ import annotations

from benchmarks.peers.catalogue import Peer
from benchmarks.peers.environments import MissingError
from benchmarks.peers.process import Process


class Crew:
    """For one kind of case and one number of threads: packages take that when they start, and keep it.

    `versions` and `missing`, the reasons of those who cannot take part, are by the names of peers, and shared by crews.
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

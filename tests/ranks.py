"""Worker processes that stand for the ranks of a process group.

They are started once and run one function after the other, each in a process group of its own, so that no call
inherits anything from the one before. Everything stays on the loopback interface, on ports that the system hands out.
Workers end with the process that started them: they read its commands from a pipe, and stop when that is closed.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

MOST = 4
_TIMEOUT_SECONDS = 60.0


class Ranks:
    """Up to four worker processes."""

    def __init__(self) -> None:
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._workers: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []
        self._calls = 0

    def run(self, count: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call ``function(rank, *args)`` on ``count`` ranks; return what each returns, or raise if one raises."""
        while len(self._workers) < count:
            self._workers.append(_start(len(self._workers), self._store.port))
        self._calls += 1
        workers = self._workers[:count]
        for _, pipe in workers:
            pipe.send((count, self._calls, function, args))
        answers = []
        for rank, (_, pipe) in enumerate(workers):
            if not pipe.poll(2 * _TIMEOUT_SECONDS):
                self.close()
                raise TimeoutError(f"rank {rank} of {count} does not answer")
            answers.append(pipe.recv())
        failures = [f"rank {rank}:\n{text}" for rank, (text, _) in enumerate(answers) if text]
        if failures:
            raise AssertionError("\n".join(failures))
        return [result for _, result in answers]

    def close(self) -> None:
        """End the workers."""
        for _, pipe in self._workers:
            pipe.close()
        for process, _ in self._workers:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
        self._workers.clear()


def _start(rank: int, port: int) -> tuple[multiprocessing.process.BaseProcess, Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(rank, port, theirs), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _work(rank: int, port: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    warnings.simplefilter("error")
    store = TCPStore("127.0.0.1", port, is_master=False)
    while True:
        try:
            count, call, function, args = pipe.recv()
        except EOFError:
            return
        pipe.send(_call(rank, count, PrefixStore(str(call), store), function, args))


def _call(rank: int, count: int, store: Store, function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[str, Any]:
    timeout = datetime.timedelta(seconds=_TIMEOUT_SECONDS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=timeout)
    try:
        return "", function(rank, *args)
    except BaseException:
        return traceback.format_exc(), None
    finally:
        dist.destroy_process_group()

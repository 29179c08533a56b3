"""Worker processes that stand for the ranks of a process group.

They are started once and run one function after the other, each in a process group of its own, so that no call
inherits anything from the one before. Everything stays on the loopback interface, on a port that the system hands out.
Workers end with the process that started them: they read its commands from a pipe, and stop when that is closed.

The benchmarks start their ranks with it as well.
"""

from __future__ import annotations

import datetime
import inspect
import multiprocessing
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

OnWarning = Literal["default", "error"]


class RankError(Exception):
    """A rank raised, died or does not answer."""


class Ranks:
    """As many worker processes as were asked for at once, with one torch thread each.

    ``timeout`` is how many seconds a collective may take; a call may take twice as long.
    """

    def __init__(self, timeout: float = 60.0, on_warning: OnWarning = "default") -> None:
        self._timeout, self._on_warning = timeout, on_warning
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._workers: list[tuple[BaseProcess, Connection]] = []
        self._calls = 0

    def run(self, count: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call ``function(rank, *args)`` on ``count`` ranks; return what each returns, or raise if one raises."""
        self._calls += 1
        try:
            while len(self._workers) < count:
                self._workers.append(self._start(len(self._workers)))
            for _, pipe in self._workers[:count]:
                pipe.send((count, self._calls, function, args))
            answers = [self._answer(rank, count) for rank in range(count)]
        except BaseException:  # also Ctrl-C: whoever is in a collective now would wait in it for the others
            self._end(patience=0)
            raise
        failures = [f"rank {rank}:\n{text}" for rank, (text, _) in enumerate(answers) if text]
        if failures:
            raise RankError("\n".join(failures))
        return [result for _, result in answers]

    def close(self) -> None:
        """End the workers."""
        self._end(patience=10)

    def _start(self, rank: int) -> tuple[BaseProcess, Connection]:
        # torch and Numba take seconds to import. A server has done that once, and forks each rank.
        context: Any = multiprocessing.get_context("forkserver" if sys.platform.startswith("linux") else "spawn")
        context.set_forkserver_preload([__name__, "rowstep.distributed", "numba"])
        ours, theirs = context.Pipe()
        how = (self._store.port, self._timeout, self._on_warning, dict(os.environ))
        process = context.Process(target=_work, args=(theirs, rank, *how), daemon=True)
        process.start()
        theirs.close()
        return process, ours

    def _answer(self, rank: int, count: int) -> tuple[str, Any]:
        _, pipe = self._workers[rank]
        if not pipe.poll(2 * self._timeout):
            raise RankError(f"rank {rank} of {count} is not responding")
        try:
            answer: tuple[str, Any] = pipe.recv()
        except EOFError:
            raise RankError(f"rank {rank} of {count} exited unexpectedly") from None
        return answer

    def _end(self, patience: float) -> None:
        workers, self._workers = self._workers, []
        for _, pipe in workers:
            pipe.close()
        for process, _ in workers:
            process.join(patience)
            if process.is_alive():
                process.kill()
                process.join()


def new_group_in_order(members: list[int], **options: Any) -> Any:
    """A group whose ranks are in this order. An older torch has no ``sort_ranks``, and always sorts them."""
    if "sort_ranks" in inspect.signature(dist.new_group).parameters:
        options["sort_ranks"] = False
    return dist.new_group(members, **options)


def _work(
    pipe: Connection, rank: int, port: int, timeout: float, on_warning: OnWarning, environment: dict[str, str]
) -> None:
    os.environ.clear()  # that of the server, which may be older
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all processes of a terminal; the first one ends us
    torch.set_num_threads(1)
    if sys.platform.startswith("linux"):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    warnings.simplefilter(on_warning)
    # As in pyproject.toml, which the ranks do not read.
    writer = r"torch\.distributed\.checkpoint\.filesystem"
    warnings.filterwarnings("ignore", "TypedStorage is deprecated", UserWarning, writer)
    store = TCPStore("127.0.0.1", port, is_master=False)
    while True:
        try:
            count, call, function, args = pipe.recv()
        except (EOFError, ConnectionError):
            os._exit(0)  # nothing is left to tidy up, and torch takes a second or more to end by itself
        pipe.send(_call(rank, count, PrefixStore(str(call), store), timeout, function, args))


def _call(
    rank: int, count: int, store: Store, timeout: float, function: Callable[..., Any], args: tuple[Any, ...]
) -> tuple[str, Any]:
    patience = datetime.timedelta(seconds=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=patience)
    try:
        return "", function(rank, *args)
    except BaseException:
        return traceback.format_exc(), None
    finally:
        dist.destroy_process_group()

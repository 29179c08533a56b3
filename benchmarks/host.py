"""The suite `host`: what prefetching hides; tables in files against tables in RAM, also with too little memory.

A model on another device is a sleep. What is to be measured of a whole process runs in one of its own, at the end here.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import mmap
import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from benchmarks.cases import TINY_UNIFORM, TINY_ZIPF, Case, batches_of_ids
from benchmarks.contenders import DisagreementError, check_close, state_bytes
from benchmarks.memory import KINDS
from benchmarks.report import Grid, times
from benchmarks.sparse.fresh import in_fresh_interpreter, status
from benchmarks.suite import Bar, Part, Suite
from benchmarks.timing import BUSY, Contender, watch
from rowstep import DeferredAdam, HostEmbedding, SparseAdam, _host, prefetched, storage

RAM, FILE = "in RAM", "in a file"
NAME = "table.safetensors"
FITS = Case("fits-uniform", 10_000_000, 64, 65_536), Case("fits-zipf", 10_000_000, 64, 65_536, zipf=True)
TINY = replace(TINY_UNIFORM, name="fits-uniform"), replace(TINY_ZIPF, name="fits-zipf")
BEYOND = Case("beyond-memory", 32_000_000, 64, 65_536, zipf=True, batches=24)
SPARSE_FILE = Case("sparse-file", 312_500_000, 160, 1_000)  # 100 GB
MODEL_SECONDS = 0.05
SMALLEST = KINDS["row, no first"].options
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "SparseAdam": SparseAdam,
    "row, no first": functools.partial(SparseAdam, **SMALLEST),
    "DeferredAdam": DeferredAdam,
}

LEAST_HIDDEN = {False: 0.9, True: 0.7}  # by whether ids are Zipf's
FILE_OVER_RAM = 1.05
TIMES_MEMORY = 4  # what the table and its state take, over what the process may use
LEAST_SPEED = 0.5  # of the run in RAM
OPENED_SECONDS, OPENED_MEGABYTES = 2, 100


class HostSuite(Suite):
    file = "host"

    def parts(self) -> Iterator[Part]:
        for case in TINY if self.quick else FITS:
            yield Part(case.name.replace("fits", "prefetch"), functools.partial(self._hidden, case))
        for case in TINY if self.quick else FITS:
            yield Part(case.name, functools.partial(self._fits, case))
        yield Part("beyond-memory", self._beyond)
        yield Part("sparse-file", self._sparse_file)

    def _hidden(self, case: Case) -> None:
        pool = [ids for (ids,) in batches_of_ids(replace(case, batches=8 if self.quick else 24))]
        for name, make in OPTIMIZERS.items():
            with watch() as load:
                (plain, weight), (ahead, same) = (row_seconds(case, make, pool, ahead) for ahead in (False, True))
            if not torch.equal(weight, same):
                raise DisagreementError(f"{case.about}, {name}: prefetching has changed the weights")
            hidden = [1 - of(ahead) / of(plain) for of in (min, median)]
            seconds = [of(each) for each in (plain, ahead) for of in (min, median)]
            self.findings.setdefault("prefetch", []).append((f"{case.about}, {name}", seconds, hidden))
            if make is not DeferredAdam:  # whose rows cannot be read before they have caught up
                what = f"row time hidden, median: {case.about}, {name}"
                bar = Bar(what, LEAST_HIDDEN[case.zipf], hidden[1], at_least=True, disturbed=load.others > BUSY)
                self.bars.append(bar)

    def _fits(self, case: Case) -> None:
        pool = [ids for (ids,) in batches_of_ids(case)]
        with tempfile.TemporaryDirectory() as folder:
            tables = {RAM: table(case), FILE: table(case, Path(folder, NAME))}
            loops = {name: Loop(each, itertools.cycle(pool)) for name, each in tables.items()}
            for loop in loops.values():
                for _ in pool:
                    loop.run()
            check_close(case.name, loops[FILE].table.weight, loops[RAM].table.weight)
            lineups = {
                "step": [Contender(name, loop.backward, loop.optimizer.step) for name, loop in loops.items()],
                "loop": [Contender(name, lambda _: None, loop.run) for name, loop in loops.items()],
            }
            for kind, lineup in lineups.items():
                for measured in self.measure(kind, case, lineup, f"{kind}: {case.about}"):
                    self.expect_at_most("a file over RAM", measured, FILE, RAM, FILE_OVER_RAM)

    def _beyond(self) -> None:
        case = replace(TINY_ZIPF, batches=4) if self.quick else BEYOND
        with tempfile.TemporaryDirectory() as folder, watch() as load:
            np.save(Path(folder, "ids.npy"), np.stack([ids.numpy() for (ids,) in batches_of_ids(case)]))
            in_ram = in_fresh_interpreter(train, folder, case.rows, case.dim, RAM)
            limit = in_ram["bytes"] // TIMES_MEMORY
            with contextlib.nullcontext() if self.quick else control_group(limit) as group:
                in_file = in_fresh_interpreter(train, folder, case.rows, case.dim, FILE, group=group)
            disk = reads_per_second(Path(folder, NAME))
        self.findings["beyond_memory"] = {"about": case.about, "limit": limit, "disk": disk, RAM: in_ram, FILE: in_file}
        what = f"steps per second with a quarter of the memory, of those in RAM: {case.about}"
        speed = in_ram["seconds"] / in_file["seconds"]
        self.bars.append(Bar(what, LEAST_SPEED, speed, "x", at_least=True, disturbed=load.others > BUSY))

    def _sparse_file(self) -> None:
        case = replace(TINY_UNIFORM, ids=100) if self.quick else SPARSE_FILE
        with tempfile.TemporaryDirectory() as folder, watch() as load:
            self.findings["sparse_file"] = found = in_fresh_interpreter(
                create_and_step, folder, case.rows, case.dim, case.ids
            )
        what = f"create, open and step {case.ids:,} rows of {case.weights * 2 / 1e9:.0f} GB"
        self.bars.append(Bar(what, OPENED_SECONDS, found["seconds"], " s", disturbed=load.others > BUSY))
        self.bars.append(Bar(f"{what}: more memory resident", OPENED_MEGABYTES, found["resident"] / 1e6, " MB"))

    def tables(self) -> Iterator[Grid | str]:
        if found := self.findings.get("prefetch"):
            head = [
                "table and state",
                "ms plain,\nminimum",
                "median",
                "ms prefetched,\nminimum",
                "median",
                "hidden",
                "median",
            ]
            lines = [
                [about, *(f"{each * 1e3:.1f}" for each in seconds), *(f"{share:.0%}" for share in hidden)]
                for about, seconds, hidden in found
            ]
            yield Grid("Time spent on rows in a step, while a model takes 50 ms elsewhere", head, lines)
        if fits := self.of_kind("step", "loop"):
            yield times("A table in a file that fits in memory", fits, (RAM, FILE), {"file/\nRAM": (FILE, RAM)})
        if found := self.findings.get("beyond_memory"):
            lines = [
                [name, f"{one['seconds'] * 1e3:,.0f}", f"{one['faults']:,.0f}", f"{one['read'] / 1e6:,.1f}"]
                for name, one in ((name, found[name]) for name in (RAM, FILE))
            ]
            title = f"{found['about']}; the file with {found['limit'] / 1e9:.2f} GB of memory"
            yield Grid(title, ["table", "ms a step", "page faults", "MB read"], lines)
            alone = found[FILE]["read"] / mmap.PAGESIZE / found["disk"]
            yield f"The disk reads {found['disk']:,.0f} pages a second: {alone * 1e3:,.0f} ms for those of a step"
        if found := self.findings.get("sparse_file"):
            resident = f"{found['resident'] / 1e6:.0f} MB more resident"
            yield f"Sparse file, created, opened and stepped: {found['seconds']:.2f} s, {resident}"


class Loop:
    """Training without a model: batches in turn."""

    def __init__(self, table: HostEmbedding, batches: Iterable[Tensor], **options: Any) -> None:
        self.table, self.batches = table, iter(batches)
        self.optimizer = SparseAdam(table.parameters(), lr=0.01, **(options or SMALLEST))

    def backward(self, _number: int = 0) -> None:
        self.table.weight.grad = None
        torch.autograd.backward(self.table(next(self.batches)).float().square().mean())

    def run(self) -> None:
        self.backward()
        self.optimizer.step()


def table(case: Case, path: Path | None = None) -> HostEmbedding:
    """The same weights in RAM or in a file."""
    if path is None:
        filled = torch.full((case.rows, case.dim), 0.01, dtype=torch.bfloat16)
        return HostEmbedding.from_pretrained(filled, freeze=False, device="cpu")
    storage.create(path, case.rows, case.dim, torch.bfloat16, lambda chunk: chunk.fill_(0.01))
    return HostEmbedding(case.rows, case.dim, dtype=torch.bfloat16, device="cpu", path=path)


def row_seconds(
    case: Case, make: Callable[..., Any], pool: Sequence[Tensor], ahead: bool
) -> tuple[list[float], Tensor]:
    """What each step spends on rows, and the weights in the end.

    That is the way from ids to rows, and the optimizer's step; not what the device would do, the lookup among the rows
    and the sums of their gradients.
    """
    usual, taken, arrived_at = _host._Arrived, [], 0.0

    class Arrived:
        @staticmethod
        def apply(*arguments: Any) -> Any:
            nonlocal arrived_at
            arrived_at = time.perf_counter()
            return usual.apply(*arguments)  # type: ignore[no-untyped-call]

    weights = table(case)
    optimizer = make(weights.parameters(), lr=0.01)
    gradient = torch.randn(case.ids, case.dim, generator=torch.Generator().manual_seed(0)).bfloat16()
    with mock.patch.object(_host, "_Arrived", Arrived):
        start = time.perf_counter()
        for ids in prefetched(pool, {weights: lambda ids: ids}) if ahead else pool:
            optimizer.zero_grad()
            rows = weights(ids)
            spent = arrived_at - start
            time.sleep(MODEL_SECONDS)
            torch.autograd.backward(rows, gradient)
            start = time.perf_counter()
            optimizer.step()
            taken.append(spent + time.perf_counter() - start)
            start = time.perf_counter()
    return taken[4:-1], weights.weight.detach()  # kernels are loaded, and something is announced


# In a process of its own


@contextlib.contextmanager
def control_group(limit: int) -> Iterator[Path]:
    """Whose processes may use so much memory, page cache included. It takes root."""
    root = Path("/sys/fs/cgroup")
    is_unified = (root / "cgroup.controllers").exists()
    group = (root if is_unified else root / "memory") / f"rowstep-{os.getpid()}"
    group.mkdir()
    try:
        (group / ("memory.max" if is_unified else "memory.limit_in_bytes")).write_text(str(limit))
        yield group
    finally:
        group.rmdir()


def train(folder: str, rows: int, dim: int, where: str) -> dict[str, float]:
    """What a step takes, over the second half of the batches."""
    batches = [*torch.from_numpy(np.load(Path(folder, "ids.npy")))]
    path = Path(folder, NAME) if where == FILE else None
    in_files = {} if path is None else {"state_dir": folder}
    weights, half, seen = table(Case("", rows, dim, 0), path), len(batches) // 2, []
    loop = Loop(weights, prefetched(batches, {weights: lambda ids: ids}), **SMALLEST, **in_files)
    for number in range(len(batches)):
        if number == half:
            seen.append(_counters())
        loop.backward()
        time.sleep(MODEL_SECONDS)
        loop.optimizer.step()
    seen.append(_counters())
    taken = {key: (seen[1][key] - seen[0][key]) / (len(batches) - half) for key in seen[0]}
    weight = weights.weight
    return taken | {"bytes": weight.nbytes + round(state_bytes(loop.optimizer) * weight.numel())}


def reads_per_second(path: Path, count: int = 20_000) -> float:
    """How many pages of a file the disk reads, if 32 threads ask for pages at random."""
    with path.open("rb", buffering=0) as file, ThreadPoolExecutor(32) as threads:
        os.fsync(file.fileno())
        for advice in (os.POSIX_FADV_DONTNEED, os.POSIX_FADV_RANDOM):
            os.posix_fadvise(file.fileno(), 0, 0, advice)
        places = np.random.default_rng(0).integers(0, path.stat().st_size // mmap.PAGESIZE, count) * mmap.PAGESIZE
        start = time.perf_counter()
        for _ in threads.map(lambda place: os.pread(file.fileno(), mmap.PAGESIZE, place), places.tolist()):
            pass
        return count / (time.perf_counter() - start)


def _counters() -> dict[str, float]:
    of_disk = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    return {"seconds": time.perf_counter(), "faults": faults, "read": int(of_disk["read_bytes"])}


def create_and_step(folder: str, rows: int, dim: int, ids: int) -> dict[str, float]:
    path, batch = Path(folder, NAME), torch.randint(0, rows, (ids,))
    small = HostEmbedding(1000, dim, dtype=torch.bfloat16, device="cpu")
    Loop(small, [batch % 1000]).run()  # loads the kernels
    before, start = status("VmRSS"), time.perf_counter()
    storage.create(path, rows, dim, torch.bfloat16)
    opened = HostEmbedding(rows, dim, dtype=torch.bfloat16, device="cpu", path=path)
    loop = Loop(opened, [batch], state_dir=folder, **SMALLEST)
    loop.run()
    return {"seconds": time.perf_counter() - start, "resident": status("VmRSS") - before}

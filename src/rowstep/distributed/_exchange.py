"""Every collective of this library, each a small function that counts what it sends.

``_fetch`` tells what a lookup sends, and why in that order. DTensors and torch's checkpoints send by themselves.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

_T = TypeVar("_T")
_S = TypeVar("_S")


class PeerError(RuntimeError):
    """Another rank raised during a call that all ranks make together, so this rank cannot complete it either."""


@dataclass(eq=False)  # blocks that count may lie within each other: each is found by what it is
class Traffic:
    """Bytes that this rank has sent to other ranks, by kind of message."""

    sent: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.sent.values())


_counting: list[Traffic] = []
_tables: MutableMapping[ProcessGroup, int] = weakref.WeakKeyDictionary()  # how many each group has


@contextlib.contextmanager
def count_traffic() -> Iterator[Traffic]:
    """Count the bytes that this rank's collectives send inside the block."""
    traffic = Traffic()
    _counting.append(traffic)
    try:
        yield traffic
    finally:
        _counting.remove(traffic)


def _count(kind: str, rank: int, rows: list[int], bytes_per_row: int) -> None:
    for traffic in _counting:
        traffic.sent[kind] = traffic.sent.get(kind, 0) + (sum(rows) - rows[rank]) * bytes_per_row


class Route(NamedTuple):
    """How the rows of one lookup travel: how many this rank gets from each rank, and how many each gets from it."""

    asked: list[int]
    owed: list[int]
    group: ProcessGroup

    @property
    def back(self) -> Route:
        """The other way, which ids and gradients take."""
        return Route(self.owed, self.asked, self.group)


def ranks_of(group: ProcessGroup | None) -> tuple[int, int]:
    """This process's rank in the group, and how many there are."""
    if group is None:
        return 0, 1
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("this process is not in the process group; expected one of its ranks")
    return rank, dist.get_world_size(group)


def number_of_table(group: ProcessGroup | None) -> int:
    """A number for a new table, by which ranks see whether they look up the same one."""
    if group is None:
        return 0
    _tables[group] = _tables.get(group, 0) + 1
    return _tables[group]


def default_group(group: ProcessGroup | None) -> ProcessGroup | None:
    """The group to use: the one given, the one of all ranks, or None in a process without torch.distributed."""
    if group is not None or not (dist.is_available() and dist.is_initialized()):
        return group
    return dist.group.WORLD


def swap_headers(
    counts: list[int], failure: Exception | None, group: ProcessGroup, *, table: int, has_backward: bool
) -> list[int]:
    """Tell each rank how many rows this one wants of it; return how many each wants of this one.

    Raises unless all look up the same ``table``, and all or none of them with a backward pass. A ``failure`` is raised
    on the rank that met it, and a :class:`PeerError` on all others.
    """
    rank, ranks = ranks_of(group)
    word = table << 2 | has_backward << 1 | (failure is not None)
    headers = torch.tensor([[word, count] for count in counts], device=_device_for(group))
    answers = torch.empty_like(headers)
    _count("headers", rank, [1] * ranks, 16)
    dist.all_to_all_single(answers, headers, group=group)
    words, owed = answers.t().tolist()
    if any(word & 1 for word in words):
        _raise_everywhere(failure, group)
    if len(set(words)) > 1:
        raise RuntimeError(
            "ranks looked up different tables in one call, or only some of them with gradients; expected the same "
            f"lookups in the same order on every rank (table numbers by rank: {[word >> 2 for word in words]})"
        )
    return cast(list[int], owed)


def send_ids(numbers: Tensor, way: Route) -> Tensor:
    """Send each rank the numbers of the rows wanted of it; return those that are wanted of this one, by who asked."""
    _count("ids", dist.get_rank(way.group), way.owed, numbers.element_size())
    return _swap(numbers, way)


def agree(action: Callable[[], _T], group: ProcessGroup | None) -> _T:
    """The result of ``action``, if it raises on no rank; if it does on some, all ranks raise."""
    if group is None:
        return action()
    result, failure = attempt(action, instead=None)
    flag = torch.tensor([failure is not None], dtype=torch.int32, device=_device_for(group))
    rank, ranks = ranks_of(group)
    _count("votes", rank, [1] * ranks, flag.nbytes)
    dist.all_reduce(flag, dist.ReduceOp.MAX, group=group)
    if flag.item():
        _raise_everywhere(failure, group)
    return cast(_T, result)


def attempt(action: Callable[[], _T], instead: _S) -> tuple[_T | _S, Exception | None]:
    """The result, or something in its place and what was raised: a rank that fails still has to tell the others."""
    try:
        return action(), None
    except Exception as error:
        return instead, error


def _raise_everywhere(failure: Exception | None, group: ProcessGroup) -> None:
    """Raise this rank's own failure, or tell it what the others have met. Every rank comes here."""
    reports: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(reports, failure and f"{type(failure).__name__}: {failure}", group=group)
    if failure is not None:
        raise failure
    failed = "; ".join(f"rank {rank}: {report}" for rank, report in enumerate(reports) if report is not None)
    raise PeerError(f"this call failed on other ranks: {failed}")


def _swap(outgoing: Tensor, way: Route) -> Tensor:
    """Send ``way.owed[r]`` rows of ``outgoing`` to each rank r; return the ``way.asked[r]`` rows that each sends."""
    incoming = outgoing.new_empty(sum(way.asked), *outgoing.shape[1:])
    dist.all_to_all_single(incoming, outgoing.contiguous(), way.asked, way.owed, group=way.group)
    return incoming


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, way: Route, divisor: int) -> Tensor:
        ctx.way, ctx.divisor = way, divisor
        _count("rows", dist.get_rank(way.group), way.owed, _row_bytes(rows))
        return _swap(rows, way)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        way = ctx.way.back
        _count("gradients", dist.get_rank(way.group), way.owed, _row_bytes(grad))
        incoming = _swap(grad, way)
        return incoming.div_(ctx.divisor) if ctx.divisor > 1 else incoming, None, None


def send_rows(rows: Tensor, way: Route, *, divisor: int) -> Tensor:
    """Send rows to those who asked, and get those asked for. Their gradients come back divided by ``divisor``."""
    received: Tensor = _Rows.apply(rows, way, divisor)  # type: ignore[no-untyped-call]
    return received


def _row_bytes(rows: Tensor) -> int:
    return math.prod(rows.shape[1:]) * rows.element_size()


@dataclass(frozen=True)
class GroupPeers:
    """The ranks of a process group, as the core knows them: ``_part.Peers``."""

    group: ProcessGroup

    def __deepcopy__(self, memo: dict[int, Any]) -> GroupPeers:
        return self  # a process group cannot be copied

    def gather_numbers(self, measure: Callable[[], float]) -> list[float]:
        """What every rank measures. If that raises on some rank, all ranks raise."""
        number, failure = attempt(measure, instead=0.0)
        report = torch.tensor([failure is not None, number], dtype=torch.float64, device=_device_for(self.group))
        reports = torch.stack(gather_everywhere(report, self.group)).tolist()
        if any(failed for failed, _ in reports):
            _raise_everywhere(failure, self.group)
        return [number for _, number in reports]

    def sum(self, local: Tensor) -> Tensor:
        """The sum of every rank's tensor of this shape, added in the order of ranks: the same bits on all."""
        gathered = gather_everywhere(local.to(_device_for(self.group)), self.group)
        return torch.stack(gathered).sum(dim=0).to(local.device)


def gather_everywhere(local: Tensor, group: ProcessGroup) -> list[Tensor]:
    """Every rank's tensor of this shape and dtype, in the order of ranks."""
    gathered = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
    _count("gathered", 0, [1] * len(gathered), local.nbytes)
    dist.all_gather(gathered, local.contiguous(), group=group)
    return gathered


def gather_uneven(group: ProcessGroup, *tensors: Tensor) -> list[Tensor]:
    """For each tensor, those of all ranks one after the other. They have one length, which may differ between ranks."""
    length = torch.tensor([len(tensors[0])], device=_device_for(group))
    lengths = [int(other) for other in gather_everywhere(length, group)]
    gathered = []
    for local in tensors:
        padded = local.new_empty(max(lengths), *local.shape[1:])  # gloo's all_gather wants equal shapes
        padded[: len(local)] = local
        parts = zip(gather_everywhere(padded, group), lengths, strict=True)
        gathered.append(torch.cat([part[:length] for part, length in parts]))
    return gathered


def each_block(local: Tensor, lengths: list[int], group: ProcessGroup | None) -> Iterator[Tensor]:
    """Every rank's block in turn, on all ranks; only one at a time is in memory."""
    if group is None:
        yield local
        return
    for rank, length in enumerate(lengths):
        mine = rank == dist.get_rank(group)
        block = local.contiguous() if mine else local.new_empty(length, *local.shape[1:])
        if mine:
            _count("blocks", rank, [1] * len(lengths), block.nbytes)
        dist.broadcast(block, group_src=rank, group=group)
        yield block


def twin_group(group: ProcessGroup | None) -> ProcessGroup:
    """Another group of the same ranks, whose collectives cannot get between those of the first."""
    group = default_group(group)
    if group is None:
        raise ValueError("torch.distributed is not initialized; call torch.distributed.init_process_group first")
    ranks, backend = dist.get_process_group_ranks(group), dist.get_backend_config(group)
    twin: ProcessGroup = dist.new_group(ranks, backend=backend, use_local_synchronization=True)
    return twin


def _device_for(group: ProcessGroup) -> torch.device:
    """Where small messages must be: NCCL knows no CPU tensors."""
    if "cpu" in dist.get_backend_config(group):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())

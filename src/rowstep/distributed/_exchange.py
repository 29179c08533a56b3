"""Every collective of this library, each a small function that counts what it sends.

Ranks *synchronize* before they send: each tells each other which operation it is about to run. If those differ (other
tables, a lookup and a backward pass), if one rank has failed, or if one does not arrive in time, all of them raise and
say so. Whatever is sent after that has been agreed on. Headers are of one size, so that ranks that are out of sync can
still read them.

``_lookup`` tells what a lookup sends, and why in that order. DTensors and torch's checkpoints send by themselves.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import weakref
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .._torch_internals import new_group, timeout_of
from ._operation import Operation, fingerprint, pending_of
from ._traffic import count

_T = TypeVar("_T")

Counts = list[list[int]]
"""Numbers of rows, by table and then by rank."""


class PeerError(RuntimeError):
    """Another rank raised, did something else or did not arrive, in a call that all ranks make together.

    The message names the table and the rank, and quotes what went wrong there. After it, the tables remain usable,
    except after a timeout.

    Examples:
        >>> from rowstep.distributed import PeerError
        >>> issubclass(PeerError, RuntimeError)
        True
    """


# Groups


def ranks_of(group: ProcessGroup | None) -> tuple[int, int]:
    """This process's rank in the group, and how many there are."""
    if group is None:
        return 0, 1
    try:
        rank = dist.get_rank(group)
    except ValueError as error:
        raise ValueError(
            "the process group was destroyed; expected the one that the table was made with. Save checkpoints before "
            "destroy_process_group. To go on, make tables in a new group, and load a checkpoint into them; until then, "
            "a table's weight still has this rank's rows"
        ) from error
    if rank < 0:
        raise ValueError("this process is not in the process group; expected one of its ranks")
    return rank, dist.get_world_size(group)


def default_group(group: ProcessGroup | None) -> ProcessGroup | None:
    """The group to use: the one given, the one of all ranks, or None in a process without torch.distributed."""
    if group is not None or not (dist.is_available() and dist.is_initialized()):
        return group
    return dist.group.WORLD


_numbers: MutableMapping[ProcessGroup, Iterator[int]] = weakref.WeakKeyDictionary()
_twins: MutableMapping[ProcessGroup, ProcessGroup] = weakref.WeakKeyDictionary()


def twin_group(group: ProcessGroup | None) -> ProcessGroup:
    """Another group of the same ranks, with the same timeout, whose collectives cannot get between those of the first.

    All ranks of the group must call this together, and no others. Torch's own names have a count in them, of the groups
    that this rank is in, and ranks that are in different numbers of groups would wait for each other under different
    names. So a twin is named after its group, and ranks need no message to agree on that.
    """
    group = default_group(group)
    if group is None:
        raise ValueError("torch.distributed is not initialized; call torch.distributed.init_process_group first")
    ranks_of(group)  # raises if this process is not one of them
    name = f"rowstep-{next(_numbers.setdefault(group, itertools.count()))}-of-{group.group_name}"
    ranks, backend = dist.get_process_group_ranks(group), dist.get_backend(group)
    return new_group(name, ranks, backend=backend, timeout=timeout_of(group))


def _channel(group: ProcessGroup) -> ProcessGroup:
    """The group through which our own messages go, made when the first one is sent.

    Not the user's: were a rank to call ``dist.all_reduce`` while another waits for it in a backward pass, gloo would
    take the message of one for that of the other, and abort the process.
    """
    if group not in _twins:
        _twins[group] = twin_group(group)
    return _twins[group]


def _device_for(group: ProcessGroup) -> torch.device:
    """Where small messages must be: NCCL knows no CPU tensors."""
    if "cpu" in dist.get_backend_config(group):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


# Synchronization


def synchronize(
    operation: Operation,
    numbers: Sequence[int] | int,
    group: ProcessGroup | None,
    *,
    failure: Exception | None = None,
    kind: str = "headers",
) -> list[int]:
    """Wait until all ranks are about to run ``operation``; send each rank one number, and return what each has sent.

    A single int goes to all. A ``failure`` is raised on the rank that met it, and a :class:`PeerError` on all others.
    """
    _, ranks = ranks_of(group)
    numbers = [numbers] * ranks if isinstance(numbers, int) else list(numbers)
    if group is None or ranks == 1:
        if failure is not None:
            raise failure
        return numbers
    word = operation.key << 1 | (failure is not None)
    outgoing = torch.tensor([[word, number] for number in numbers], device=_device_for(group))
    incoming = torch.empty_like(outgoing)
    count(kind, 16 * (ranks - 1))
    with _naming(operation, group):
        dist.all_to_all_single(incoming, outgoing, group=_channel(group))
    words, answers = incoming.t().tolist()
    if len(set(words)) > 1 or words[0] & 1:
        _raise_together(failure, operation, group)
    return cast(list[int], answers)


def agree(operation: Operation, action: Callable[[], _T], group: ProcessGroup | None) -> _T:
    """The result of ``action``, if it raises on no rank; if it does on some, all ranks raise."""
    result, failure = attempt(action)
    synchronize(operation, 0, group, failure=failure, kind="votes")
    return cast(_T, result)


def attempt(action: Callable[[], _T]) -> tuple[_T | None, Exception | None]:
    """The result, or None and what was raised: a rank that fails still has to tell the others."""
    try:
        return action(), None
    except Exception as error:
        return None, error


def _raise_together(failure: Exception | None, operation: Operation, group: ProcessGroup) -> None:
    """Raise this rank's own failure, or tell what the others met or were about to run. Every rank calls this."""
    pending_of(group).open.clear()  # ranks may be out of sync, and begin anew
    mine = (failure and f"{type(failure).__name__}: {failure}", operation.text, operation.details)
    reports: list[Any] = [None] * dist.get_world_size(group)
    with _naming(operation, group):
        dist.all_gather_object(reports, mine, group=_channel(group))
    if failure is not None:
        raise failure
    if failed := [f"rank {rank}: {report}" for rank, (report, *_) in enumerate(reports) if report is not None]:
        raise PeerError(f"this call failed on other ranks: {'; '.join(failed)}")
    common = set.intersection(*(set(details) for *_, details in reports))
    operations = []
    for rank, (_, text, details) in enumerate(reports):
        special = "; ".join(detail for detail in details if detail not in common)
        operations.append(f"rank {rank}: {text}" + (f" ({special})" if special else ""))
    raise PeerError(
        "ranks are out of sync; expected the same lookups and the same backward passes, in the "
        f"same order, on every rank. {'; '.join(operations)}"
    )


@contextlib.contextmanager
def _naming(operation: Operation, group: ProcessGroup) -> Iterator[None]:
    """Say what this rank was waiting for if others do not come in time, or are gone."""
    try:
        yield
    except RuntimeError as error:
        missing = pending_of(group).in_words
        raise PeerError(
            f"timed out waiting for other ranks, or lost them, in the {operation.text}"
            f"{f'; this rank made {missing}' if missing else ''}. torch says: {error}"
        ) from error


# Messages


def all_to_all(
    kind: str,
    tensors: Sequence[Tensor],
    sizes: Counts,
    expected: Counts,
    operation: Operation,
    group: ProcessGroup | None,
) -> list[Sequence[Tensor]]:
    """Send ``sizes[n][r]`` rows of tensor n to each rank r; return the ``expected[n][r]`` that arrive from each.

    They travel in one message, whatever their widths and dtypes, and are returned as bytes: for each tensor a part from
    each rank, or all in one.
    """
    rank, ranks = ranks_of(group)
    flat = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]
    if group is None or ranks == 1:
        return [[each] for each in flat]
    row_bytes = [math.prod(tensor.shape[1:]) * tensor.element_size() for tensor in tensors]
    outgoing, incoming = (
        [[count * size for count in each] for each, size in zip(counts, row_bytes, strict=True)]
        for counts in (sizes, expected)
    )
    to_ranks, from_ranks = ([*map(sum, zip(*each, strict=True))] for each in (outgoing, incoming))
    count(kind, sum(to_ranks) - to_ranks[rank])
    message = flat[0]
    if len(flat) > 1:  # from tensor by tensor to rank by rank, and back
        parts = [torch.split(each, cuts) for each, cuts in zip(flat, outgoing, strict=True)]
        message = torch.cat([part for of_rank in zip(*parts, strict=True) for part in of_rank])
    arrived = message.new_empty(sum(from_ranks))
    with _naming(operation, group):
        dist.all_to_all_single(arrived, message, from_ranks, to_ranks, group=_channel(group))
    if len(flat) == 1:
        return [[arrived]]
    cut = torch.split(arrived, [size for of_rank in zip(*incoming, strict=True) for size in of_rank])
    return [cut[number :: len(flat)] for number in range(len(flat))]


def as_rows(parts: Sequence[Tensor], count: int, like: Tensor) -> Tensor:
    """Rows that have arrived as bytes. Parts of a message are copied, so that they lie where their dtype may lie."""
    return joined(parts).view(like.dtype).view(count, *like.shape[1:])


def joined(parts: Sequence[Tensor]) -> Tensor:
    """One after the other; a single one is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def all_gather(
    tensors: Sequence[Tensor], mark: bool, operation: Operation, group: ProcessGroup
) -> tuple[list[Tensor], list[bool]]:
    """For each tensor, those of all ranks one after the other, and the marks of all ranks.

    The tensors of a rank have one length, which may differ between ranks.
    """
    answers = synchronize(operation, len(tensors[0]) << 1 | mark, group, kind="gathered")
    lengths, marks = [answer >> 1 for answer in answers], [bool(answer & 1) for answer in answers]
    sizes, expected = [[len(tensors[0])] * len(lengths)] * len(tensors), [lengths] * len(tensors)
    to_each = [torch.cat([tensor] * len(lengths)) for tensor in tensors]
    arrived = all_to_all("gathered", to_each, sizes, expected, operation, group)
    if len(lengths) == 1:
        count("gathered", 0)  # it took part, though there was nobody to send to
    gathered = [as_rows(parts, sum(lengths), like) for parts, like in zip(arrived, tensors, strict=True)]
    return gathered, marks


def each_block(local: Tensor, lengths: list[int], operation: Operation, group: ProcessGroup | None) -> Iterator[Tensor]:
    """Every rank's block in turn, on all ranks; only one at a time is in memory."""
    if group is None:
        yield local
        return
    for rank, length in enumerate(lengths):
        mine = rank == dist.get_rank(group)
        block = local.contiguous() if mine else local.new_empty(length, *local.shape[1:])
        if mine:
            count("blocks", (len(lengths) - 1) * block.nbytes)
        with _naming(operation, group):
            dist.broadcast(block, group_src=rank, group=_channel(group))
        yield block


# What the core asks of ranks


@dataclass(frozen=True)
class GroupPeers:
    """The ranks of a process group, as the core knows them (``_part.Peers``); equal where their group is the same."""

    group: ProcessGroup

    def __deepcopy__(self, memo: dict[int, Any]) -> GroupPeers:
        return self  # a process group cannot be copied

    def __reduce__(self) -> Any:
        raise TypeError(
            "a sharded table, its weight and its optimizer cannot be pickled, as by torch.save: they belong to a "
            "process group. Save state dicts with torch.distributed.checkpoint, or save table.to_embedding()"
        )

    @property
    def live_group(self) -> ProcessGroup:
        """The group. Raises if it was destroyed."""
        ranks_of(self.group)
        return self.group

    def gather_numbers(self, measure: Callable[[], float], what: str, *about: object) -> list[float]:
        """What every rank measures. If that raises on some rank, all ranks raise.

        So they do unless all ranks call this with the same ``what``, in words, and ``about``, in plain values.
        """
        number, failure = attempt(measure)
        word = torch.tensor([number or 0.0], dtype=torch.float64).view(torch.int64).item()
        operation = Operation(what, fingerprint(what, about), [str(fact) for fact in about])
        words = synchronize(operation, int(word), self.group, failure=failure, kind="gathered")
        numbers: list[float] = torch.tensor(words, dtype=torch.int64).view(torch.float64).tolist()
        return numbers

    def before_step(self) -> None:
        """Raise on all ranks if only some of them have run the backward pass of a lookup."""
        pending = pending_of(self.group)
        if pending.open:
            operation = Operation(f"optimizer step, with {pending.in_words}", fingerprint("step", *pending.open))
            synchronize(operation, 0, self.group)
            pending.open.clear()  # no rank has

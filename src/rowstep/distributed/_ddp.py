"""DistributedDataParallel for models with tables.

Sharded tables look after their own gradients, so DDP is told to leave them alone. Tables that every rank holds whole
(replicated) get a communication hook, because torch's own way with sparse gradients goes wrong twice:

- it divides them by the number of ranks in place. Where the outputs of two tables are added, both gradients share the
  memory of their values, which is then divided twice;
- a table that some rank did not use has no gradient there: "Expected sparse gradient to be defined". DDP asks for
  gradients when the first one of a backward pass reaches any of its parameters. Empty ones are given right before that
  moment, so a program may do what it likes with gradients between its forward and backward pass. Those of tables that
  no rank has used are taken back when the pass has ended. A rank that has looked up no ids has used the table, as in
  one process, and that no gradient shows: so ranks tell each other.
"""

# Annotations must stay objects here: DDP looks at those of the hook.

import contextlib
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from .._commit import note_ddp
from .._part import ROW_ORDER
from .._torch_internals import (
    after_backward,
    hidden_from_ddp,
    hide_from_ddp,
    indices_of,
    number_of_backward,
    parameters_of_ddp,
    values_of,
)
from . import _exchange
from ._dedupe import dedupe, sum_duplicates
from ._operation import Operation
from ._table import ShardedTable

_WRAPPING = Operation("wrapping of a model by ddp")
_AVERAGING = Operation("averaging of a replicated table's gradient by ddp")


def ddp(model: nn.Module, process_group: ProcessGroup | None = None, **options: Any) -> DistributedDataParallel:
    """Wrap a model with sharded or replicated tables in torch's DistributedDataParallel.

    DistributedDataParallel gets its own process group, with the ranks of ``process_group``, so that its collectives
    cannot interleave with those of sharded tables, whatever the order of a backward pass. All ranks of
    ``process_group`` must call this together, and no others. Sharded tables must be sharded over the same ranks.

    Args:
        model: has parameters besides its sharded tables.
        process_group: by default all ranks.
        **options: for DistributedDataParallel.

    Returns:
        The wrapped model. Save and copy its ``module``.

    Examples:
        >>> import torch
        >>> from rowstep.distributed import ShardedEmbedding, ddp
        >>> store = torch.distributed.HashStore()
        >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> model = torch.nn.Sequential(ShardedEmbedding(100, 8), torch.nn.Linear(8, 1))
        >>> parallel = ddp(model)
        >>> parallel(torch.tensor([3, 5])).sum().backward()
        >>> del parallel, model
        >>> torch.distributed.destroy_process_group()
    """
    group = _exchange.default_group(process_group)
    _exchange.ranks_of(group)  # raises if this process is not one of them
    tables = _exchange.agree(_WRAPPING, lambda: _check(model, group, options), group)
    hide_from_ddp(model, _names_of_sharded(model))
    for name, module in model.named_modules():
        if isinstance(module, ShardedTable):
            module.set_label(name)
    if tables:
        options.setdefault("find_unused_parameters", True)
    twin = _exchange.twin_group(group)
    wrapped = _DataParallel(model, process_group=twin, **options)
    note_ddp(wrapped, parameters_of_ddp(wrapped), tables)
    if tables:
        exchange = _ReplicatedTables(tables, twin)
        wrapped.register_comm_hook(exchange, _ReplicatedTables.average)
        if wrapped.find_unused_parameters:
            exchange.give_empty_gradients(wrapped)
    return wrapped


class _DataParallel(DistributedDataParallel):
    """DistributedDataParallel, except for what cannot work in the process group and with the tables that it has."""

    def join(self, divide_by_initial_world_size: bool = True, enable: bool = True, *args: Any, **options: Any) -> Any:
        if not enable and _has_tables(self.module):
            return contextlib.nullcontext()
        return super().join(divide_by_initial_world_size, enable, *args, **options)

    def join_hook(self, **options: Any) -> Any:
        if _has_tables(self.module):
            raise RuntimeError(
                "join is not supported for a model with sparse tables: a rank that has run out of batches cannot take "
                "part in their exchanges. Let every rank make the same number of steps; it may look up an empty batch"
            )
        return super().join_hook(**options)  # type: ignore[no-untyped-call]


# Gradients of replicated tables


class _ReplicatedTables:
    """Averages the gradients of these tables, among them empty ones of those that this rank has not used."""

    def __init__(self, tables: Sequence[Tensor], group: ProcessGroup) -> None:
        self._tables, self._group = tables, group
        self._given: list[tuple[Tensor, Tensor]] = []  # still there if a backward pass has raised
        self._backward = -1  # the number of the pass they were given in

    def average(
        self,
        bucket: dist.GradBucket,  # type: ignore[name-defined]  # torch's stubs lack it
    ) -> torch.futures.Future[Tensor]:
        """A DDP communication hook that averages sparse gradients over ranks correctly. Dense ones use torch's hook.

        Duplicates are summed before sending. The received gradients are concatenated in rank order, uncoalesced.
        """
        gradient = bucket.buffer()
        if not gradient.is_sparse:
            return default_hooks.allreduce_hook(self._group, bucket)
        (table,) = bucket.parameters()
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        # Not now but when this rank's backward pass is through: where a rank does not use a table, DDP hands its
        # gradient over early, and waiting here for the others would keep them waiting for this rank's part in a sharded
        # table's.
        after_backward(lambda: done.set_result(self._mean_over_ranks(table, gradient)))
        return done

    def _mean_over_ranks(self, table: Tensor, gradient: Tensor) -> Tensor:
        found = dedupe(indices_of(gradient)[0])
        sums = sum_duplicates(values_of(gradient), found)
        is_used = not self._has_given(table)
        (rows, sums), uses = _exchange.all_gather([found.numbers, sums], is_used, _AVERAGING, self._group)
        if any(uses):  # then all ranks keep the gradient, and count the step
            self._given = [each for each in self._given if each[0] is not table]
        mean = sums.div_(len(uses))
        return torch.sparse_coo_tensor(
            rows.unsqueeze(0), mean, gradient.shape, device=mean.device, check_invariants=False
        )

    def give_empty_gradients(self, wrapped: DistributedDataParallel) -> None:
        """From now on, the tables have a gradient whenever this wrapper asks for it."""
        for param in parameters_of_ddp(wrapped):
            if param.requires_grad:
                own = param if any(param is table for table in self._tables) else None
                node = get_gradient_edge(param).node  # the wrapper keeps it, and with it the hook
                handle = node.register_prehook(lambda grads, own=own: self._before_accumulation(own, grads))
                weakref.finalize(wrapped, handle.remove)  # another wrapper may keep the node

    def _before_accumulation(self, table: Tensor | None, grads: Sequence[Any]) -> None:
        """A gradient is about to be added to a parameter, which may be one of the tables."""
        if self._backward != (running := number_of_backward()):
            self._give()
            self._backward = running
        if table is not None and grads[0] is not None and self._has_given(table):
            table.grad = None  # torch takes the new gradient as it is, and need not copy it

    def _has_given(self, table: Tensor) -> bool:
        """Whether the gradient of the table is an empty one that this rank's program knows nothing of."""
        return any(table is other and table.grad is empty for other, empty in self._given)

    def _give(self) -> None:
        for table in self._tables:
            if table.grad is None:
                table.grad = _without_entries(table)
                self._given.append((table, table.grad))
        # What is queued now runs before DDP's own work at the end of the pass, what is queued then runs after it.
        after_backward(lambda: after_backward(self._take_back))

    def _take_back(self) -> None:
        for table, empty in self._given:
            if table.grad is empty:
                table.grad = None
        self._given.clear()


def _without_entries(table: Tensor) -> Tensor:
    return torch.sparse_coo_tensor(
        torch.empty(1, 0, dtype=torch.int64, device=table.device),
        torch.empty(0, *table.shape[1:], dtype=table.dtype, device=table.device),
        table.shape,
        device=table.device,
        check_invariants=False,
    )


# What is refused, before anything has changed


def _check(model: nn.Module, group: ProcessGroup | None, options: dict[str, Any]) -> list[Tensor]:
    """The weights of the tables that every rank holds whole and whose sparse gradients DDP is to average."""
    for name, module in model.named_modules():
        if isinstance(module, ShardedTable):
            _check_ranks(name, module, group)
    if options.get("device_mesh") is not None:
        raise ValueError("device_mesh is not supported; pass process_group=device_mesh.get_group() instead")
    hidden = _names_of_sharded(model) | hidden_from_ddp(model)
    reduced = {id(param) for name, param in model.named_parameters() if param.requires_grad and name not in hidden}
    if not reduced and not options.get("delay_all_reduce_named_params"):
        raise ValueError(
            "the model has no parameter that needs a gradient outside of sharded tables, so there is nothing for ddp "
            "to average: sharded tables do that themselves. Use the model itself instead"
        )
    tables = [table for table in _replicated_tables(model) if id(table) in reduced]
    if tables and options.get("static_graph"):
        raise ValueError(
            "static_graph=True is not supported with replicated sparse tables: their gradients are exchanged after the "
            "backward pass, but DDP would wait for them during it. Use static_graph=False, or shard the tables"
        )
    if tables and options.get("mixed_precision") is not None:
        raise ValueError(
            "mixed_precision is not supported with replicated sparse tables: both need a communication hook, and DDP "
            "takes only one. Use torch.autocast instead, or shard the tables"
        )
    return tables


def _check_ranks(name: str, table: ShardedTable[Any], group: ProcessGroup | None) -> None:
    if group is None:
        return
    _exchange.ranks_of(table.group)  # raises if it was destroyed
    ours = sorted(dist.get_process_group_ranks(group))
    theirs = [dist.get_rank()] if table.group is None else sorted(dist.get_process_group_ranks(table.group))
    if theirs != ours:
        cause = " because it was created before init_process_group" if table.group is None else ""
        raise ValueError(
            f"the table {name!r} is sharded over the ranks {theirs}{cause}; expected {ours}, the ranks of ddp's "
            "process group, because copies of a table in several groups drift apart. Create it with group=process_group"
        )


def _names_of_sharded(model: nn.Module) -> set[str]:
    """All names that the weights and buffers of sharded tables have in the model."""
    tables = [module for module in model.modules() if isinstance(module, ShardedTable)]
    tensors = {id(tensor) for table in tables for tensor in (table.weight, getattr(table, ROW_ORDER))}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    names = {name for name, tensor in named if id(tensor) in tensors}
    # To some parts of DDP, a tensor of the outermost module has a name that begins with a dot.
    return names | {f".{name}" for name in names if "." not in name}


def _replicated_tables(model: nn.Module) -> list[Tensor]:
    tables = [module for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag))]
    weights: dict[int, Tensor] = {id(table.weight): table.weight for table in tables if table.sparse}
    return list(weights.values())


def _has_tables(model: nn.Module) -> bool:
    return bool(_replicated_tables(model)) or any(isinstance(module, ShardedTable) for module in model.modules())

"""DistributedDataParallel for models with tables.

Sharded tables look after their own gradients, so DDP is told to leave them alone. Tables that every rank holds whole
(replicated) get a communication hook, because torch's own way with sparse gradients goes wrong twice:

- it divides them by the number of ranks in place. Where the outputs of two tables are added, both gradients share the
  memory of their values, which is then divided twice;
- a table that some rank did not use has no gradient there: "Expected sparse gradient to be defined".
"""

# Annotations must stay objects here: DDP looks at those of the hook.

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from .._part import ROW_ORDER
from .._torch_internals import after_backward, entries_of, hide_from_ddp
from . import _exchange
from ._dedupe import dedupe, sum_duplicates
from ._table import ShardedTable
from ._unused import give_empty_gradients


def allreduce_hook(
    group: ProcessGroup | None,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # torch's stubs lack it
) -> torch.futures.Future[Tensor]:
    """A DDP communication hook that averages sparse gradients over ranks correctly. Dense ones use torch's hook.

    ``model.register_comm_hook(None, rowstep.distributed.allreduce_hook)``. Duplicates are summed before sending. The
    received gradients are concatenated in rank order and left uncoalesced. Not for ``static_graph=True``.
    """
    gradient = bucket.buffer()
    if not gradient.is_sparse:
        return default_hooks.allreduce_hook(group, bucket)  # type: ignore[arg-type]  # it takes None
    own = _exchange.default_group(group)
    assert own is not None, "DDP runs in a process group"
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    # Not now but when this rank's backward pass is through: where a rank does not use a table, DDP hands its gradient
    # over early, and waiting here for the others would keep them waiting for this rank's part in a sharded table's.
    after_backward(lambda: done.set_result(_mean_over_ranks(gradient, own)))
    return done


def _mean_over_ranks(gradient: Tensor, group: ProcessGroup) -> Tensor:
    indices, values = entries_of(gradient)
    rows = indices[0]
    found = dedupe(rows)
    indices, sums = _exchange.gather_uneven(group, found.numbers, sum_duplicates(values, found))
    mean = sums.div_(dist.get_world_size(group))
    return torch.sparse_coo_tensor(indices.unsqueeze(0), mean, gradient.shape, check_invariants=False)


def ddp(model: nn.Module, process_group: ProcessGroup | None = None, **options: Any) -> DistributedDataParallel:
    """Wrap a model with sharded or replicated tables in torch's DistributedDataParallel.

    ``options`` are passed to DistributedDataParallel. It gets its own process group, with the ranks of
    ``process_group`` (by default all), so that its collectives cannot interleave with those of sharded tables, whatever
    the order of a backward pass.
    """
    sharded = [name for name, module in model.named_modules() if isinstance(module, ShardedTable)]
    hide_from_ddp(model, {f"{name}.{key}".removeprefix(".") for name in sharded for key in ("weight", ROW_ORDER)})
    tables = _replicated_tables(model)
    if tables and options.get("static_graph"):
        raise ValueError(
            "static_graph=True is not supported with replicated sparse tables: their gradients are exchanged after the "
            "backward pass, but DDP would wait for them during it. Use static_graph=False, or shard the tables"
        )
    if tables:
        options.setdefault("find_unused_parameters", True)
    group = _exchange.twin_group(process_group)
    wrapped = DistributedDataParallel(model, process_group=group, **options)
    wrapped.register_comm_hook(group, allreduce_hook)
    if tables and wrapped.find_unused_parameters:
        give_empty_gradients(wrapped, tables)
    return wrapped


def _replicated_tables(model: nn.Module) -> list[Tensor]:
    """The weights, each once, of the tables that every rank holds whole and whose sparse gradients DDP averages."""
    tables = [module for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag))]
    weights = {id(table.weight): table.weight for table in tables if table.sparse}
    return [weight for weight in weights.values() if weight.requires_grad]

"""Row surgery: tables that grow, shrink, are reordered or have rows started anew, in the middle of a run.

A parameter and all of its state are changed together, and the parameter stays the same object, so that modules and
optimizers that hold it keep working. The rows that remain go on as if nothing had happened. A gradient that is there
belongs to the old rows and is dropped, and a backward pass whose forward pass read the old rows raises. An
``nn.Embedding`` keeps its own note of the number of rows, for its ``repr`` only: set ``module.num_embeddings`` if you
print it.

Everything new is allocated first and put in place at the end: an error or an interrupt leaves all as it was.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ._commit import replace_table
from ._ids import check_inside, numbers_of
from ._memory import zeros_like
from ._part import part_of
from ._state import State, row_slots

Init = Tensor | Callable[[Tensor], object]
"""The weights of new rows, or a function that fills zeros in place, as ``torch.nn.init``'s do, or returns weights."""


def grow(param: Tensor, state: State, count: int, init: Init) -> None:
    """Append ``count`` rows with the weights ``init``, or what it makes of them, and the state of rows never seen."""
    _refuse_a_part(param)
    if not isinstance(count, int) or count < 0:
        raise ValueError(f"rows is {count}; expected the number of rows to add, 0 or more")
    if not isinstance(init, Tensor) and not callable(init):
        raise TypeError(f"init is {init!r}; expected a tensor of weights, or a function that fills or returns one")
    old = row_count(param)
    table = param.new_empty(old + count, *param.shape[1:])
    table[:old] = param.detach()
    new = table[old:].zero_()
    made = init if isinstance(init, Tensor) else init(new)
    if isinstance(made, Tensor) and made is not new:
        if made.shape != new.shape:
            raise ValueError(f"init has shape {tuple(made.shape)}; expected {tuple(new.shape)}")
        new.copy_(made)
    changed = {}
    for name in row_slots(state):
        changed[name] = zeros_like(state[name].new_empty(old + count, *state[name].shape[1:]))
        changed[name][:old] = state[name]
    replace_table(param, table, state, changed)


def keep(param: Tensor, state: State, rows: Tensor) -> None:
    """Keep these rows, in this order, and drop the others."""
    _refuse_a_part(param)
    changed = {name: state[name].index_select(0, rows) for name in row_slots(state)}
    replace_table(param, param.detach().index_select(0, rows), state, changed)


def reset(state: State, rows: Tensor) -> None:
    """Give these rows the state of rows never seen. Their weights are left to the caller.

    No row moves, so gradients and graphs stay good.
    """
    before = [(state[name], state[name].index_select(0, rows)) for name in row_slots(state)]
    try:
        for tensor, _ in before:
            tensor.index_fill_(0, rows, 0)
    except BaseException:
        for tensor, values in before:
            tensor.index_copy_(0, rows, values)
        raise


def named_rows(param: Tensor, mask_or_ids: Tensor) -> Tensor:
    """Row numbers from a mask over all rows or from a list of distinct ids."""
    row_count(param)  # raises if there are no rows
    rows = numbers_of(mask_or_ids, param)
    if mask_or_ids.dim() != 1:
        raise ValueError(f"ids has shape {tuple(mask_or_ids.shape)}; expected one dimension")
    check_inside(rows, param)
    if len(torch.unique(rows)) != len(rows):
        raise ValueError("ids contains duplicates; expected each row at most once")
    return rows


def require_tensor(param: object, expected: str) -> None:
    if not isinstance(param, Tensor):
        hint = ": pass module.weight" if isinstance(param, nn.Module) else ""
        raise TypeError(f"param is of type {type(param).__name__}; expected {expected}{hint}")


def row_count(param: Tensor) -> int:
    if param.dim() == 0:
        raise ValueError("the parameter has no dimensions, so it has no rows; expected at least one dimension")
    return len(param)


def select_rows_(param: Tensor, mask_or_ids: Tensor) -> None:
    """Replace a dense ``param.grad`` with a sparse gradient of the given rows, without ``force_sparse``'s scan.

    Use this if you know which rows a gradient concerns. The values are not inspected: a given row counts as touched
    even if its gradient is zero.

    Args:
        param: a Tensor with a dense gradient.
        mask_or_ids: a boolean mask over all rows, or distinct row numbers.

    Examples:
        >>> import torch
        >>> from rowstep import select_rows_
        >>> weight = torch.nn.Parameter(torch.ones(5, 2))
        >>> weight[[1, 3]].sum().backward()  # the gradient of an indexed read is dense
        >>> select_rows_(weight, torch.tensor([1, 3]))
        >>> weight.grad.is_sparse, weight.grad._indices()
        (True, tensor([[1, 3]]))
    """
    require_tensor(param, "a Tensor with a dense gradient")
    grad = param.grad
    if grad is None or grad.is_sparse:
        raise ValueError(f"the parameter's gradient is {'None' if grad is None else 'sparse'}; expected a dense one")
    rows = named_rows(param, mask_or_ids)
    param.grad = torch.sparse_coo_tensor(
        rows.unsqueeze(0), grad.index_select(0, rows), grad.shape, device=grad.device, check_invariants=False
    )


def _refuse_a_part(param: Tensor) -> None:
    part = part_of(param)
    if part is not None:
        raise ValueError(
            f"the parameter holds {len(param)} of the {part.order.rows} rows of a sharded table; expected an unsharded "
            "table, because the size of a sharded one is fixed. Unshard it with to_embedding, change it, and shard it "
            "again with from_embedding"
        )

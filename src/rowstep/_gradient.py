"""Any sparse gradient as rows of a table.

A COO gradient with ``sparse_dim = k`` names entries by their first k dimensions. Those are flattened to one row number
and the rest to columns, so that every gradient is a list of (row, values) over a two-dimensional table:

    nn.Embedding(N, D)       k = 1    N rows of D columns
    x.to_sparse(), 2-D       k = 2    N*D rows of one column
    sparse_dim 0             k = 0    one row

Presence decides which rows are touched, never the value: an explicit zero is a gradient. Duplicates are welcome,
uncoalesced is the normal case, and the gradient itself is not changed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ._memory import has_memory, is_dtensor, lost_memory
from ._state import FLOATS, FLOATS_IN_WORDS, compute_dtype
from ._torch_internals import has_no_memory, indices_of, values_of


class RowGradient:
    """For each of ``count`` row numbers a row of values, in order of occurrence, over a table of ``lead`` rows."""

    __slots__ = ("columns", "count", "indices", "lead", "values")

    def __init__(
        self, indices: Tensor, values: Tensor, lead: Sequence[int], shape: tuple[int, int] | None = None
    ) -> None:
        self.indices, self.values = indices, values
        """int64, contiguous; numbers of rows flattened over ``lead``, not yet checked against ``row_count``. And
        floating, (count, columns)."""
        self.count, self.columns = shape or values.shape
        self.lead = lead
        """The leading dimensions of the parameter that a row number runs over; empty where one row is the whole."""

    @property
    def row_count(self) -> int:
        return math.prod(self.lead)

    def check_memory(self) -> None:
        """Raise if the gradient has less memory than it says."""
        if self.values.is_cpu and not (has_memory(self.values) and has_memory(self.indices)):
            raise ValueError(lost_memory("the gradient's values or row numbers", self.values))

    @property
    def rows(self) -> Tensor:
        """The row numbers, in one dimension."""
        return self.indices.view(-1)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to update: no entries, or entries without a single number."""
        return not self.count or not self.columns


def outside_message(index: int, size: int, dimension: int = 0) -> str:
    return f"the gradient has index {index} in dimension {dimension}; expected 0 <= index < {size}"


def row_gradient(grad: Tensor, shape: torch.Size) -> RowGradient:
    """The rows of a sparse COO gradient for a parameter of this shape."""
    indices, values = indices_of(grad), values_of(grad)
    sparse_dim = indices.shape[0]
    if sparse_dim == 1:
        rows = indices[0]
    elif sparse_dim == 0:
        rows = indices.new_zeros(len(values))
    else:
        rows = _flatten_indices(indices, shape[:sparse_dim])
    return _over(rows, values.reshape(len(values), math.prod(shape[sparse_dim:])), shape[:sparse_dim])


def _over(rows: Tensor, values: Tensor, lead: Sequence[int]) -> RowGradient:
    return RowGradient(rows.contiguous(), values, lead)


def _flatten_indices(indices: Tensor, lead: Sequence[int]) -> Tensor:
    # An index outside its own dimension can fall inside the flattened table, so it is looked for here.
    limits = torch.tensor(lead, device=indices.device).unsqueeze(1)
    outside = (indices < 0) | (indices >= limits)
    if outside.any():
        dimension, position = outside.nonzero()[0].tolist()
        raise IndexError(outside_message(int(indices[dimension, position]), lead[dimension], dimension))
    rows = indices[0]
    for size, index in zip(lead[1:], indices[1:], strict=True):
        rows = rows * size + index
    return rows


def nonzero_rows(grad: Tensor) -> RowGradient:
    """The rows of a dense gradient that hold a non-zero (or NaN): what ``force_sparse`` counts as touched."""
    table = by_first_dimension(grad)
    rows = table.ne(0).any(dim=1).nonzero().squeeze(1)
    return _over(rows, table.index_select(0, rows), grad.shape[:1])


def rows_of_first_dimension(grad: Tensor, *dtypes: torch.dtype) -> RowGradient:
    """A sparse gradient as rows along the first dimension, whatever its sparse_dim. What it does not name is 0.

    Only for updates in which a zero gradient and none are the same, as in dense Adam. If duplicates must be summed
    here, they are summed in ``compute_dtype`` of the gradient and ``dtypes``.
    """
    shape, sparse_dim = grad.shape, grad.sparse_dim()
    if sparse_dim == 1:
        return row_gradient(grad, shape)
    grad = grad.to(compute_dtype(grad.dtype, *dtypes))
    if sparse_dim == 0:
        # Not by to_dense: torch 2.13 adds stride(0) numbers of a single entry, which may be more than it has.
        return all_rows(values_of(grad).sum(dim=0))
    _flatten_indices(indices_of(grad), shape[:sparse_dim])  # for its check: coalesce trusts the indices
    grad = grad.coalesce()
    rows, position = torch.unique(grad.indices()[0], return_inverse=True)
    values = grad.values().new_zeros(len(rows), *shape[1:])
    values.index_put_((position, *grad.indices()[1:]), grad.values())
    return _over(rows, values.reshape(len(rows), math.prod(shape[1:])), shape[:1])


def all_rows(grad: Tensor) -> RowGradient:
    """Every row of a dense gradient."""
    values = by_first_dimension(grad)
    return _over(torch.arange(len(values), device=grad.device), values, grad.shape[:1])


def by_first_dimension(dense: Tensor) -> Tensor:
    """A dense tensor as a table of rows along its first dimension; a 0-dim tensor is one row of one column."""
    return dense.reshape(math.prod(dense.shape[:1]), math.prod(dense.shape[1:]))


def check_gradient(param: Tensor) -> Tensor:
    """The gradient of a parameter; raise if it does not fit.

    One that torch represents lazily (negated, or zeros without memory) is written out: its fused Adam takes neither.
    """
    grad, dtype = param.grad, param.dtype
    assert grad is not None
    if not grad.is_sparse:
        grad = _written_out(grad)
    elif is_dtensor(param):  # which has no memory that a kernel could be given
        raise TypeError(
            "the parameter is a DTensor with a sparse gradient; expected a plain parameter. Train its to_local() as one"
        )
    if dtype not in FLOATS:
        raise TypeError(f"the parameter has dtype {dtype}; expected {FLOATS_IN_WORDS}")
    if grad.shape != param.shape:
        raise ValueError(
            f"the gradient has shape {tuple(grad.shape)}; expected {tuple(param.shape)}, the parameter's shape"
        )
    if grad.dtype is not dtype and grad.dtype not in FLOATS:
        raise TypeError(f"the gradient has dtype {grad.dtype}; expected {FLOATS_IN_WORDS}")
    if not (grad.is_cpu and param.is_cpu) and grad.device != param.device:
        raise ValueError(f"the gradient is on {grad.device}; expected {param.device}, the parameter's device")
    return grad


def _written_out(grad: Tensor) -> Tensor:
    if grad.layout != torch.strided:
        raise TypeError(f"the gradient's layout is {grad.layout}; expected torch.sparse_coo or torch.strided")
    if grad.is_neg() or has_no_memory(grad):
        return torch.empty_like(grad).copy_(grad)
    if grad.is_cpu and not has_memory(grad):
        raise ValueError(lost_memory("the gradient", grad))
    return grad

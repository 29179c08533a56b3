"""Ids that a caller names rows by: of any shape and integer dtype, or a mask over all rows."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def numbers_of(ids: Tensor, param: Tensor) -> Tensor:
    """Row numbers from ids of any shape, or from a mask over all rows."""
    if type(ids) is Tensor and ids.dtype is torch.int64 and ids.is_cpu and param.is_cpu:  # by far the most frequent
        return ids if ids.dim() == 1 and ids.is_contiguous() else ids.reshape(-1).contiguous()
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.is_complex():
        found = f"has dtype {ids.dtype}" if isinstance(ids, Tensor) else f"is a {type(ids).__name__}"
        raise TypeError(f"ids {found}; expected an integer tensor or a boolean mask")
    numbers = ids.detach().reshape(-1)
    if numbers.dtype == torch.bool:
        count = math.prod(param.shape[:1])
        if len(numbers) != count:
            raise ValueError(f"the mask has {len(numbers)} entries; expected {count}, one per row")
        numbers = numbers.nonzero().view(-1)
    return numbers.to(device=param.device, dtype=torch.int64).contiguous()


def check_inside(rows: Tensor, param: Tensor) -> None:
    """Raise if one of these row numbers is not in the table."""
    count = math.prod(param.shape[:1])
    outside = rows[(rows < 0) | (rows >= count)]
    if len(outside):
        raise outside_error(int(outside[0]), count)


def outside_error(number: int, count: int) -> IndexError:
    """What to raise for an id that names no row of a table of so many."""
    return IndexError(f"id {number} is outside the table; expected 0 <= id < {count}")

"""The order in which the rows of a sharded table lie: pure arithmetic, which checkpoints need as lookups do.

    position = (multiplier * id + offset) mod rows

Plain blocks of ids would put the popular rows, which in most vocabularies have the smallest ids, on the first rank: at
8 ranks with Zipf ids it had 5 to 6.7 times the mean load. So ids are spread first, by a map that does not know the
number of ranks: the same table can then be cut again for any other number.

With a multiplier near the golden section of the number of rows, neighbouring ids, and ids that follow each other in
any but a few odd strides, fall far apart. The busiest of 8 ranks then had 1.02 to 1.05 times the mean load (Zipf ids,
also in strides of 2 to 4,096, tables of 100,000 to 10 million rows).

In state dicts, the shape of a tensor says in which order its rows lie. In the order of ids it has the shape of a plain
model's. In a spread order it is a view with three dimensions: (rows, width, 1), or (rows, 1, 1) with a number per row.
So torch refuses one where it expects the other, and our own loaders know what they were given. The dimension is the
last one, because torch would broadcast a block of one row into (1, 1, width).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_GOLDEN_SECTION = (math.sqrt(5) - 1) / 2

# Below this many rows a product of two of their numbers fits into 63 bits.
_PRODUCT_FITS = math.isqrt(2**63 - 1)
_LOW_BITS = 21
_MOST_ROWS = 2 ** (2 * _LOW_BITS)

_SPREAD_DIM = 3


class RowOrder(NamedTuple):
    """The order in which a table's rows are laid out over the ranks. These constants go into the checkpoint."""

    rows: int
    multiplier: int
    offset: int

    @classmethod
    def by_id(cls, rows: int) -> RowOrder:
        """The order of a table that was never spread."""
        return cls(rows, 1, 0)

    @classmethod
    def spread(cls, rows: int) -> RowOrder:
        """An order in which popular rows, wherever their ids lie, are far from each other."""
        if rows > _MOST_ROWS:
            raise ValueError(f"num_embeddings is {rows}; expected at most {_MOST_ROWS}")
        multiplier = max(1, round(rows * _GOLDEN_SECTION))
        while math.gcd(multiplier, rows) > 1:
            multiplier += 1
        return cls(rows, multiplier, 0)

    @classmethod
    def of(cls, shape: Sequence[int], constants: object, rows: int) -> RowOrder:
        """The order of a tensor of a state dict. The constants, if any came along, say which spread order it is."""
        if constants is None:
            return cls.spread(rows) if is_spread(shape) else cls.by_id(rows)
        if not isinstance(constants, Tensor) or constants.shape != (3,) or constants.dtype != torch.int64:
            raise ValueError(f"the loaded row order is {constants!r}; expected an int64 tensor of three numbers")
        order = cls(*constants.tolist())
        if order.rows != rows or math.gcd(order.multiplier, rows) > 1 or min(order.multiplier, order.offset) < 0:
            raise ValueError(f"the loaded row order is {order}; expected an order of {rows} rows")
        return order if is_spread(shape) else cls.by_id(rows)

    @property
    def is_by_id(self) -> bool:
        return (self.multiplier, self.offset) == (1, 0)

    def shape_in_state_dicts(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape in state dicts of what has this shape in a plain model's."""
        return tuple(shape) if self.is_by_id else (*shape, *[1] * (_SPREAD_DIM - len(shape)))

    def positions(self, ids: Tensor) -> Tensor:
        """Where these ids are in the order, as int64 whatever the ids are: a product of two int32 would not fit."""
        ids = ids.to(torch.int64)
        if not self.rows:
            return ids
        spread = _times(ids, self.multiplier, self.rows)
        return (spread + self.offset) % self.rows if self.offset else spread  # a division costs 0.2 ms in 65,536 ids

    def ids(self, positions: Tensor) -> Tensor:
        """Which ids are at these positions."""
        if not self.rows:
            return positions
        return _times((positions - self.offset) % self.rows, pow(self.multiplier, -1, self.rows), self.rows)


def blocks(rows: int, ranks: int) -> list[range]:
    """The positions that each rank holds: blocks of one size, but the last ones may be shorter or empty.

    That is how ``torch.distributed.tensor.Shard(0)`` cuts a dimension, so a block is a shard to torch.
    """
    size = -(-rows // ranks)
    return [range(min(rank * size, rows), min((rank + 1) * size, rows)) for rank in range(ranks)]


def is_spread(shape: Sequence[int]) -> bool:
    """Whether a table's tensor of this shape has its rows in a spread order."""
    return len(shape) == _SPREAD_DIM


def _times(numbers: Tensor, factor: int, modulus: int) -> Tensor:
    """``numbers * factor`` modulo ``modulus``, for numbers and a factor below it."""
    if modulus <= _PRODUCT_FITS:
        return numbers * factor % modulus
    high, low = divmod(factor, 1 << _LOW_BITS)
    return (((numbers * high % modulus) << _LOW_BITS) % modulus + numbers * low % modulus) % modulus

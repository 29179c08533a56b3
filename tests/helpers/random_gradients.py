"""Random gradients of every layout and size, as the tensors that optimizers get and as the numbers that models take."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.helpers.gradients import sparse
from tests.helpers.rounding import Rough, as_rows, precision_of, quiet

T = TypeVar("T")

SPARSE = ("uncoalesced", "coalesced", "said to be coalesced", "strided values", "one value")
DENSE = ("dense", "dense with other strides")

# Sizes of gradients, most of them ordinary. A special one stands among ordinary numbers.
SIZES = (
    *("ordinary",) * 8,
    *("zero", "small", "tiny", "large", "subnormal", "sum overflows", "square overflows", "inf", "-inf", "nan"),
)


def special(size: str, dtype: torch.dtype) -> float:
    info = torch.finfo(dtype)
    return {
        "zero": 0.0, "small": 1e-8, "tiny": 1e-28, "large": 1e12, "subnormal": 3 * info.tiny * info.eps,
        "sum overflows": info.max, "square overflows": 16 * math.sqrt(info.max),
        "inf": math.inf, "-inf": -math.inf, "nan": math.nan,
    }[size]  # fmt: skip


class Dice:
    """Choices without Hypothesis's leaning to the first and the same."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def below(self, limit: int) -> int:
        return self._random.randrange(limit)

    def choice(self, items: Sequence[T]) -> T:
        return self._random.choice(items)


all_dice = st.integers(0, 2**32 - 1).map(Dice)


@dataclass
class Sketch:
    """A gradient that has not met its table yet."""

    layout: str
    sparse_dim: int
    ids: list[int]
    size: str
    seed: int

    def for_table(self, shape: tuple[int, ...], dtype: torch.dtype, *, by_rows: bool = False) -> Gradient:
        """The gradient that this is for a table of this shape; ``by_rows``, over its first dimension."""
        generator = torch.Generator().manual_seed(self.seed)
        is_sparse = self.layout in SPARSE
        lead = shape[: 1 if by_rows else self.sparse_dim % (len(shape) + 1)] if is_sparse else ()
        ids = [i % math.prod(lead) for i in self.ids] if math.prod(lead) else []
        if self.layout in ("coalesced", "said to be coalesced"):
            ids = list(dict.fromkeys(ids))
        if self.layout == "coalesced":
            ids.sort()
        rest = (len(ids), *shape[len(lead) :]) if is_sparse else shape
        values = torch.randn(rest, generator=generator, dtype=torch.float64).to(dtype)
        # torch's several dense Adams multiply in different orders, and so differ in when they overflow.
        size = "large" if self.size.endswith("overflows") and not is_sparse else self.size
        if size != "ordinary" and values.numel():
            positions = torch.randint(values.numel(), (1 + values.numel() // 4,), generator=generator)
            values.view(-1)[positions] = special(size, dtype)
        if self.layout == "one value" and values.numel():
            values = values.view(-1)[-1].expand(rest)
        return Gradient(self.layout, lead, ids, values)


def sketches(layouts: Sequence[str] = SPARSE * 2 + DENSE, sizes: Sequence[str] = SIZES) -> st.SearchStrategy[Sketch]:
    """Any of these. Hypothesis itself would draw one gradient in three without an entry, and few of the rare kinds."""

    def sketch(dice: Dice) -> Sketch:
        ids = [dice.below(24) for _ in range(dice.choice([0, 1, 2, 3, 4, 6, 8]))]
        return Sketch(dice.choice(layouts), dice.choice([1, 1, 1, 2, 0, 3]), ids, dice.choice(sizes), dice.below(1000))

    return all_dice.map(sketch)


@dataclass
class Gradient:
    """``values[i]`` for the row ``ids[i]`` of those that run over ``lead``; or, if dense, for all."""

    layout: str
    lead: tuple[int, ...]
    ids: list[int]
    values: Tensor

    @property
    def is_sparse(self) -> bool:
        return self.layout in SPARSE

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    def tensor(self, shape: tuple[int, ...]) -> Tensor:
        """What goes into ``param.grad``; a new one each time."""
        values = self.values if self.layout == "one value" else self.values.clone()
        if self.layout == "dense with other strides":
            return values.t().contiguous().t() if values.dim() == 2 else torch.stack([values, values], dim=-1)[..., 0]
        if not self.is_sparse:
            return values
        if self.layout == "strided values":
            values = torch.stack([values, values], dim=-1)[..., 0]
        ids = np.array(self.ids, dtype=np.int64)
        indices = np.array(np.unravel_index(ids, self.lead) if self.lead else (), dtype=np.int64)
        grad = sparse(torch.from_numpy(indices.reshape(len(self.lead), len(ids))), values, shape)
        return grad._coalesced_(True) if "coalesced" in self.layout and self.layout != "uncoalesced" else grad

    @quiet
    def summed_rows(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[tuple[int, ...], Any, Rough]:
        """The dimensions that rows run over, the rows named, and the sum of each one's occurrences, in their order.

        Of a dense gradient, the rows along the first dimension that hold a non-zero.
        """
        values = self.values.double().numpy()
        if not self.is_sparse:
            table = as_rows(values, shape[:1])
            rows = np.nonzero((table != 0).any(axis=1))[0]
            return shape[:1], rows, Rough(table[rows], 0.0, precision_of(dtype))
        columns = math.prod(shape[len(self.lead) :])
        sums: dict[int, Rough] = {}
        for row, value in zip(self.ids, values.reshape(len(self.ids), columns), strict=True):
            addend = Rough(value, 0.0, precision_of(dtype))
            sums[row] = sums[row] + addend if row in sums else addend
        rows = np.array(sorted(sums), dtype=np.int64)
        value, error = np.zeros((2, len(rows), columns))
        for position, row in enumerate(rows.tolist()):
            value[position], error[position] = sums[row].value, sums[row].error
        return self.lead, rows, Rough(value, error, precision_of(dtype))

    def all_rows(self, lead: tuple[int, ...], dtype: torch.dtype) -> tuple[Any, Rough]:
        """Every row of a dense gradient."""
        values = as_rows(self.values.double().numpy(), lead)
        return np.arange(len(values)), Rough(values, 0.0, precision_of(dtype))

    def rows_of_first_dimension(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Any, Rough]:
        """The rows along the first dimension that a sparse gradient names some number of; the others of its are 0."""
        lead, rows, sums = self.summed_rows(shape, dtype)
        value, error = np.zeros(shape), np.zeros(shape)
        for array, part in ((value, sums.value), (error, sums.error)):
            as_rows(array, lead)[rows] = part
        first = np.unique(np.unravel_index(rows, lead)[0]) if lead else np.arange(shape[0])
        value, error = (as_rows(array, shape[:1])[first] for array in (value, error))
        return first, Rough(value, error, precision_of(dtype))

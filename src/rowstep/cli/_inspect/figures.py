"""Numbers about tables, computed block by block: rows touched, norms of rows, histograms of either.

A histogram takes two passes over its values, one to find their range and one to count. So it needs no memory for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rowstep.cli._inspect.reading import UnreadableError
from rowstep.cli._inspect.stored import BLOCK, Stored, TruncatedError

BINS = 12
_LINEAR_UP_TO = 50  # a larger ratio of the largest to the least value is shown on a logarithmic scale

_HALVES_UP_TO = 1 << 52  # float64 has nothing between larger integers; no count is that large, but a file may say so

Values = Iterator[NDArray[np.float64]]


def row_norms(table: Stored) -> Values:
    """The Euclidean norm of each row."""
    for block in _blocks(table):
        yield sum(part.square().sum(1) for part in _wide_parts(block)).sqrt().numpy()  # type: ignore[union-attr]


def counts(column: Stored) -> Values:
    """The numbers themselves, of a slot with one per row."""
    for block in _blocks(column):
        yield block.to(torch.float64).reshape(-1).numpy()


def rows_above_zero(column: Stored) -> int:
    return sum(int((values > 0).sum()) for values in counts(column))


def rows_not_zero(table: Stored) -> int:
    """How many rows have any number but 0. NaN is not 0: something has been there."""
    found = 0
    for block in _blocks(table):
        touched = torch.zeros(len(block), dtype=torch.bool)
        for part in _wide_parts(block):
            touched |= part.ne(0).any(1)
        found += int(touched.sum())
    return found


def _blocks(table: Stored) -> Iterator[Tensor]:
    try:
        yield from table.blocks()
    except TruncatedError as error:
        raise UnreadableError(str(error)) from error
    except OSError as error:
        raise UnreadableError(f"a tensor cannot be read: {error.strerror}") from error


def _wide_parts(block: Tensor) -> Iterator[Tensor]:
    """The columns of a block in float64, a few at a time: one row alone may be larger than memory allows."""
    for part in torch.split(block, max(1, BLOCK // len(block)), dim=1):
        yield (part.abs() if part.is_complex() else part).to(torch.float64)


@dataclass(frozen=True)
class Histogram:
    edges: list[float]
    counts: list[int]
    not_positive: int
    not_finite: int
    is_logarithmic: bool
    is_whole: bool
    """Whether the values are integers; edges then lie between them."""


def histogram(values: Callable[[], Values], *, is_whole: bool = False) -> Histogram:
    """How values above 0 are spread; the others are counted apart."""
    least, largest, not_positive, not_finite = np.inf, 0.0, 0, 0
    for block in values():
        finite = np.isfinite(block)
        positive = block[finite & (block > 0)]
        not_finite += int((~finite).sum())
        not_positive += int(finite.sum()) - len(positive)
        least = min(least, float(positive.min(initial=np.inf)))
        largest = max(largest, float(positive.max(initial=0.0)))
    if largest == 0:
        return Histogram([], [], not_positive, not_finite, False, is_whole)
    is_logarithmic = largest / least > _LINEAR_UP_TO
    is_whole = is_whole and largest < _HALVES_UP_TO
    edges = _edges(least, largest, is_logarithmic, is_whole)
    found = np.zeros(len(edges) - 1, np.int64)
    for block in values():
        found += np.histogram(block[np.isfinite(block) & (block > 0)], edges)[0]
    return Histogram(edges.tolist(), found.tolist(), not_positive, not_finite, is_logarithmic, is_whole)


def _edges(least: float, largest: float, is_logarithmic: bool, is_whole: bool) -> NDArray[np.float64]:
    if least == largest:
        return np.array([least - 0.5, least + 0.5]) if is_whole else np.array([least, largest])
    if not is_logarithmic and is_whole:
        width = int(-(-(largest - least + 1) // BINS))
        return np.arange(least, largest + width + 0.5, width) - 0.5
    if not is_logarithmic:
        return np.linspace(least, largest, BINS + 1)
    edges = np.geomspace(least, largest, BINS + 1)
    edges[0], edges[-1] = least, largest
    if not is_whole:
        return edges
    edges[-1] += 1
    return np.unique(np.round(edges)) - 0.5

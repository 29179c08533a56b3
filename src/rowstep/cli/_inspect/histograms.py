"""Which histograms are shown: for the largest tables, how long their rows are and how many steps these have taken."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from rowstep.cli._inspect import figures
from rowstep.cli._inspect.figures import Histogram
from rowstep.cli._inspect.parameters import Parameter, Parameters
from rowstep.cli._inspect.stored import Stored

MOST_TABLES = 6


@dataclass(frozen=True)
class Pair:
    """The histograms of one table. What the file does not tell is None."""

    name: str
    norms_of: str
    norms: Histogram | None
    ages: Histogram | None


@dataclass(frozen=True)
class Histograms:
    shown: list[Pair]
    left_out: int
    """How many smaller tables there are."""


def of(parameters: Parameters) -> Histograms:
    tables = [parameter for parameter in parameters.all if _row_count(parameter) > 1]
    tables.sort(key=_row_count, reverse=True)
    pairs = [pair for table in tables[:MOST_TABLES] if (pair := _pair(table)).norms or pair.ages]
    return Histograms(pairs, max(0, len(tables) - MOST_TABLES))


def _row_count(parameter: Parameter) -> int:
    """0 unless this is a table: a bias has rows of one number, and a histogram of those shows little."""
    shape = parameter.shape
    if shape is None or len(shape) < 2 or shape[0] is None:
        return 0
    return shape[0] if _normed(parameter)[1] is not None or parameter.row_counts is not None else 0


def _normed(parameter: Parameter) -> tuple[str, Stored | None]:
    """What the norms are of: the weights, or what stands for them where the file has none."""
    for name, stored in (("weights", parameter.weights), ("exp_avg", parameter.slots.get("exp_avg"))):
        if isinstance(stored, Stored) and stored.flaw is None and stored.numel and stored.dtype.is_floating_point:
            return name, stored
    return "", None


def _pair(parameter: Parameter) -> Pair:
    name, table = _normed(parameter)
    norms = figures.histogram(partial(figures.row_norms, table)) if table is not None else None
    counts = parameter.row_counts
    ages = figures.histogram(partial(figures.counts, counts), is_whole=True) if counts is not None else None
    # A slot that is zero everywhere has not begun to count: see rowstep's bias_correction="row".
    return Pair(parameter.name, name, norms, ages if ages is not None and ages.counts else None)

"""The tables of the suite `quality`: a line per rule, with what it keeps, what it reaches, and Adam for comparison."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from benchmarks.quality.comparison import Ratio, ratio
from benchmarks.quality.planted import HEAD, TAIL
from benchmarks.quality.towers import HIT_RATE, NDCG
from benchmarks.quality.tuning import Figure, Result
from benchmarks.report import table_of_numbers

if TYPE_CHECKING:
    from rich.table import Table

_WHAT = ["rule of the tables", "state: bytes\nper weight", "learning\nrate"]
_CAPTION = "Mean ± standard deviation (minimum) over seeds. Ratios of means, with 95% intervals of a paired bootstrap."
_EDGE = " *: at the end of the rates that were tried."


def movielens(results: Sequence[Result]) -> Table:
    return _table("MovieLens-100K, two towers", results, {NDCG: "NDCG@10", HIT_RATE: "HR@10"}, with_verdict=True)


def planted(results: Sequence[Result], about: str) -> Table:
    return _table(f"Planted vectors: {about}", results, {HEAD: "error of head", TAIL: "error of tail"})


def _table(title: str, results: Sequence[Result], names: dict[str, str], *, with_verdict: bool = False) -> Table:
    verdict = [f"{next(iter(names.values()))}\nwithin 1%"] * with_verdict
    table = table_of_numbers(
        [*_WHAT, *names.values(), *(f"{name}\n/ SparseAdam's" for name in names.values()), *verdict],
        title=title,
        caption=_CAPTION + _EDGE * any(result.is_at_edge for result in results),
    )
    adam = results[0]
    for result in results:
        ratios = [ratio(result.figures[name], adam.figures[name]) for name in names]
        shown = [_figure(result.figures[name]) for name in names] + [_ratio(each) for each in ratios]
        rate = f"{result.rate:g}" + "*" * result.is_at_edge
        verdict = [ratios[0].within_one_percent] * with_verdict
        table.add_row(result.rule, f"{result.state_bytes_per_weight:.2f}", rate, *shown, *verdict)
    return table


def _figure(figure: Figure) -> str:
    return f"{figure.mean:.4f} ± {figure.deviation:.4f} ({min(figure.values):.4f})"


def _ratio(found: Ratio) -> str:
    return f"{found.mean:.3f} [{found.low:.3f}, {found.high:.3f}]"
